"""Random mutants of the core, one at a time: does a test fail?

    python -m tests.mutants.run_mutants [--number 200] [--seed 0] [--only PART] [--again] [--out FILE.json]

The mutants are drawn from all that `operators.py` makes. Each stands in a copy of the project, and the tests that run its
line try it, quickest first, until one fails or their time is over. What is equal to the code in all that it does counts
as survived, and so does what no test runs. The file is written after every mutant; a run that was stopped goes on.
"""

import argparse
import compileall
import importlib
import json
import os
import py_compile
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.mutants.line_map import MARKERS, LineMap, environment
from tests.mutants.operators import Mutant, mutants
from tests.tracked_files import copy_tracked

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("bench", "cli", "testing", "moved.py", "__main__.py")
"""What is not the core, and old names of its modules."""
PRELOADED = (
    "torch._inductor.utils",
    "transformers.modeling_utils",
    "hypothesis",
    "safetensors.torch",
    "triton.language",
)
"""What takes long to import: once, before the processes of the tests are forked."""
FIRST_S, ALL_S = 4.0, 30.0
"""What the tests of a mutant may take without it, in seconds of a processor: those that are tried first, and all of them."""
HANGS_S, HANGS_TIMES = 60.0, 4.0
"""With the mutant they hang after this, and so many times what they take without it. It is of a processor too."""
WAITS_S = 600.0
"""They wait for each other without end after this, and so many times what they take, by the clock."""
NO_TESTS = 5
"""Exit code of pytest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    path: str
    line: int
    column: int
    operator: str
    after: str
    outcome: str
    """killed, timeout (the tests hang, which kills it too) or survived."""
    by: str | None
    """The test that failed; nothing where the tests hang or cannot be collected."""
    num_tried: int
    num_tests: int
    """That run the line; more than were tried where their time was over."""
    seconds: float


def drawn(tree: Path, number: int, seed: int) -> list[Mutant]:
    """A random sample of the mutants of the core; a larger one of the same seed begins with it."""
    found = []
    for file in sorted((tree / "fp8refit").rglob("*.py")):
        if file.relative_to(tree / "fp8refit").parts[0] not in LEFT_OUT:
            found += mutants(file.read_text(), str(file.relative_to(tree)))
    random.Random(seed).shuffle(found)
    return found[:number]


def choose(mutant: Mutant, line_map: LineMap) -> list[str]:
    """The tests that run its line, quickest first.

    If none was seen to, as processes that live longer than a test hide it, those of the folder that mirrors the file's.
    """
    mirror = mutant.path.split("/")[1]
    folder = mutant.path.rpartition("/")[0].replace("fp8refit", "tests", 1) + "/"

    def order(test: str) -> tuple[float, bool, str]:
        return round(line_map.seconds[test], 1), test.split("/")[1] != mirror, test

    found = line_map.tests(mutant.path, mutant.lines)
    if not found and folder != "tests/":
        found = {test for test in line_map.seconds if test.startswith(folder)}
    return sorted(found, key=order)


def within(tests: list[str], seconds: dict[str, float], limit_s: float) -> list[str]:
    """The first of them that take no longer than the limit, and always one."""
    total, kept = 0.0, []
    for test in tests:
        total += seconds[test]
        if kept and total > limit_s:
            break
        kept.append(test)
    return kept


class Only:
    """A plugin of pytest: it runs these tests alone, in this order, and writes down which one fails."""

    def __init__(self, tests: list[str], out: Path) -> None:
        self.order = {test: position for position, test in enumerate(tests)}
        self.out = out

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.failed:
            self.out.write_text(report.nodeid)


class Copy:
    """The project in a folder of its own, whose tests run in forked processes."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.folder = folder
        self.failed = folder / "failed"
        copy_tracked(tree, folder)
        # By hash, also once they are written again: a mutant may have the size and, to the second, the time of its file.
        by_hash = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder, quiet=1, invalidation_mode=by_hash)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")  # as in tests/conftest.py
            for name in PRELOADED:
                importlib.import_module(name)

    def run(self, tests: list[str], expected_s: float) -> tuple[int | None, str | None]:
        """The exit code of pytest, negative for a signal, or None if it took too long; the test that failed."""
        self.failed.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._run_tests(tests, HANGS_S + HANGS_TIMES * expected_s)
        end = time.monotonic() + WAITS_S + HANGS_TIMES * expected_s
        done = status = 0
        while not done and time.monotonic() < end:
            time.sleep(0.02)
            done, status = os.waitpid(child, os.WNOHANG)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what it started
        if not done:
            os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status) if done else None
        by = self.failed.read_text() if self.failed.exists() else None
        return (None if code == -signal.SIGXCPU else code), by

    def _run_tests(self, tests: list[str], limit_s: float) -> None:
        """Never returns: it ends the process."""
        code = 1
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, resource.RLIM_INFINITY))
            os.chdir(self.folder)
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(environment(self.folder))
            paths = [str(self.folder), str(self.folder / "adapters")]
            sys.path[:] = paths + [path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "adapters"))]
            for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
                del sys.modules[name]
            # Processes that a test starts import the main module again: there is none.
            vars(sys.modules["__main__"]).pop("__file__", None)
            sys.modules["__main__"].__spec__ = None
            files = dict.fromkeys(test.partition("::")[0] for test in tests)
            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", MARKERS]
            code = int(pytest.main([*options, *files], plugins=[Only(tests, self.failed)]))
        finally:
            sys.stdout.flush()
            os._exit(code)


def attempt(mutant: Mutant, copy: Copy, line_map: LineMap, limit_s: float) -> Outcome:
    """Try one mutant; the copy is as it was afterwards."""
    start = time.monotonic()
    tests = choose(mutant, line_map)
    tried = within(tests, line_map.seconds, limit_s) if tests else []
    first = within(tried, line_map.seconds, FIRST_S) if tried else []
    file = copy.folder / mutant.path
    original = file.read_text()
    file.write_text(mutant.source(original))
    outcome, by = "survived", None
    try:
        for part in filter(None, (first, tried[len(first) :])):
            expected_s = sum(line_map.seconds[test] for test in part)
            code, by = copy.run(part, expected_s)
            if code not in (0, NO_TESTS):
                outcome = "timeout" if code is None else "killed"
                break
    finally:
        file.write_text(original)
    path, line, column, operator, after = mutant.key
    return Outcome(
        path=path,
        line=line,
        column=column,
        operator=operator,
        after=after,
        outcome=outcome,
        by=by,
        num_tried=len(tried),
        num_tests=len(tests),
        seconds=round(time.monotonic() - start, 1),
    )


def write(outcomes: list[dict], out: Path, about: dict) -> None:
    """Write what is known so far."""
    counts = Counter(outcome["outcome"] for outcome in outcomes)
    totals = {"tried": len(outcomes)} | {name: counts[name] for name in ("killed", "timeout", "survived")}
    rate = {"kill_rate": round(1 - counts["survived"] / len(outcomes), 3)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(about | {"totals": totals | rate, "mutants": outcomes}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=200, help="How many mutants.")
    parser.add_argument("--seed", type=int, default=0, help="Of the draw.")
    parser.add_argument("--only", default="", metavar="PART", help="Only those in files with this in their path.")
    parser.add_argument("--again", action="store_true", help="Try again what survived: with new tests, or more time.")
    parser.add_argument("--limit-s", type=float, default=ALL_S, help="How long the tests of a mutant may take.")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="FOLDER", help="Another checkout of the project.")
    parser.add_argument("--map", type=Path, metavar="FOLDER", help="Where it is kept which tests run a line.")
    parser.add_argument("--out", type=Path, default=Path("build/mutants/mutants.json"), metavar="FILE")
    chosen = parser.parse_args()

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=chosen.tree, capture_output=True, text=True, check=True
        ).stdout.strip()

    line_map = LineMap(chosen.tree, chosen.map or Path("build/mutants") / git("rev-parse", "HEAD:fp8refit"))
    line_map.collect()
    line_map.load()
    about = {
        "command": "nox -s mutants -- --out FILE",
        "commit": git("rev-parse", "--short", "HEAD"),
        "seed": chosen.seed,
        "drawn": chosen.number,
        "limit_s": chosen.limit_s,
    }
    known = json.loads(chosen.out.read_text())["mutants"] if chosen.out.exists() else []
    outcomes = {(each["path"], each["line"], each["column"], each["operator"], each["after"]): each for each in known}
    with tempfile.TemporaryDirectory(prefix="fp8refit-mutants-") as scratch:
        copy = Copy(chosen.tree, Path(scratch).resolve())
        for mutant in drawn(chosen.tree, chosen.number, chosen.seed):
            is_tried = mutant.key in outcomes and not (chosen.again and outcomes[mutant.key]["outcome"] == "survived")
            if chosen.only in mutant.path and not is_tried:
                outcomes[mutant.key] = asdict(attempt(mutant, copy, line_map, chosen.limit_s))
                write(list(outcomes.values()), chosen.out, about)
                print(*outcomes[mutant.key].values(), flush=True)


if __name__ == "__main__":
    main()
