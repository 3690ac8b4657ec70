"""Which tests run a line: collected once by `coverage`, a folder of tests at a time, so that what was stopped goes on."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from functools import cache
from pathlib import Path

from coverage import CoverageData
from coverage.exceptions import DataError

from tests.mutants import seen_lines

HERE = Path(__file__).parent
MARKERS = "not gpu and not vllm and not sglang"
TESTS = (
    *("live", "sources", "driver", "test_config.py", "checkpoint", "ranks", "transport", "fill", "tracing", "remote"),
    *("kernels", "training", "precision", "test_testing.py", "test_oracle.py", "engines", "fuzz", "adapters"),
)
"""What tests the core and needs no engine, in the order of what is collected first."""
AT_IMPORT = ""
"""The context of what runs while tests are collected."""
CONFIG = """
[run]
source = {tree}/fp8refit
data_file = {data}
concurrency = multiprocessing, thread
parallel = true
sigterm = true
core = ctrace
"""


def environment(tree: Path) -> dict[str, str]:
    """Of processes that import the project from `tree`."""
    paths = map(str, (tree, tree / "adapters"))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


class LineMap:
    """Lines of the project in `tree`, and the tests that run them; it is kept in `folder`."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree = tree.resolve()
        self.folder = folder.resolve()
        self.seconds: dict[str, float] = {}
        self._data: list[CoverageData] = []

    def collect(self) -> None:
        """Run the tests of each folder that the map does not have yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in TESTS:
            if (self.tree / "tests" / name).exists() and not (self.folder / f"{name}.json").exists():
                self._run(name)

    def _run(self, name: str) -> None:
        config = self.folder / f"{name}.ini"
        config.write_text(CONFIG.format(tree=self.tree, data=self.folder / name))
        started = environment(self.tree)
        started |= {"COVERAGE_PROCESS_START": str(config), seen_lines.OUT: str(self.folder / f"{name}.json")}
        started["PYTHONPATH"] += os.pathsep + str(HERE)
        options = ["-p", "seen_lines", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-m", MARKERS]
        command = [sys.executable, "-m", "pytest", *options, f"tests/{name}"]
        with open(self.folder / f"{name}.log", "w") as log:
            subprocess.run(command, cwd=self.tree, env=started, stdout=log, stderr=subprocess.STDOUT)
        if not (self.folder / f"{name}.json").exists():
            raise RuntimeError(f"tests/{name} did not run; see {log.name}")

    def load(self) -> None:
        """Read what was collected."""
        for file in sorted(self.folder.glob("*.json")):
            self.seconds |= json.loads(file.read_text())
            for part in sorted(self.folder.glob(f"{file.stem}.*.*")):
                data = CoverageData(str(part))
                with suppress(DataError):  # of a process that was killed
                    data.read()
                    self._data.append(data)

    def tests(self, path: str, lines: range) -> set[str]:
        """The tests that run one of these lines; of a line that runs at import, all that run a line of the file."""
        by_line = self._by_line(path)
        found = set().union(*(by_line.get(line, ()) for line in lines))
        if AT_IMPORT in found:
            found = set().union(*by_line.values())
        return found - {AT_IMPORT}

    @cache  # noqa: B019 - there is one map
    def _by_line(self, path: str) -> dict[int, set[str]]:
        known = self.seconds.keys() | {AT_IMPORT}
        found: dict[int, set[str]] = defaultdict(set)
        for data in self._data:
            for file in data.measured_files():
                if file.endswith(f"/{path}"):
                    with suppress(DataError):  # of a process that ends now: coverage renames its file
                        for line, contexts in data.contexts_by_lineno(file).items():
                            found[line].update(known & set(contexts))
        return found
