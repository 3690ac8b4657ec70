"""The wheel, built from this tree and installed into an environment of its own, beside the packages that are running here.

So nothing is downloaded, and nothing of fp8refit comes from anywhere but the wheel.
"""

import os
import site
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(kind: str, folder: Path) -> Path:
    """A `wheel` or an `sdist`, in `folder`."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.iterdir()
    return built


@dataclass(frozen=True)
class CleanInstall:
    """An environment in which the wheel is all there is of fp8refit."""

    folder: Path

    @classmethod
    def of(cls, wheel: Path, folder: Path) -> "CleanInstall":
        """Make it."""
        venv.create(folder, with_pip=False)
        found = cls(folder)
        pip = [sys.executable, "-m", "pip", "--python", found.python, "install", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*pip, wheel], check=True, capture_output=True, timeout=120)
        # Paths only: the editable fp8refit that may be there is a .pth itself, and of such a folder none is read.
        (found.site_packages / "beside.pth").write_text("\n".join(site.getsitepackages()))
        return found

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where the wheel's files are."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def run(self, *command: str | Path, environment: Mapping[str, str] | None = None, timeout_s: float = 120) -> str:
        """What a command prints; `python`, or a script of the wheel."""
        name, *rest = command
        outer = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        ended = subprocess.run(
            [self.folder / "bin" / name, *rest],
            cwd=self.folder,
            env=outer | (environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert ended.returncode == 0, f"{command} ended with {ended.returncode}\n{ended.stdout}\n{ended.stderr[-6000:]}"
        return ended.stdout


def without_source(paths: str, folder: Path) -> str:
    """A PYTHONPATH that leads to the tests, by a link in `folder`, and to nothing else of this tree's fp8refit."""
    folder.mkdir()
    (folder / "tests").symlink_to(ROOT / "tests")
    others = [path for path in paths.split(os.pathsep) if not any(Path(path).glob("fp8refit*/__init__.py"))]
    return os.pathsep.join([str(folder), *others])
