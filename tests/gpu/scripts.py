"""Runs scenarios, each an engine in processes of its own, and gives what they wrote; writes what was found for the pages."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

RESULTS = Path(os.environ.get("FP8REFIT_RESULTS", "benchmarks/results"))
"""Where tests leave JSON and logs."""


def card(gpu: str) -> str:
    """`h200` of `NVIDIA H200`."""
    return gpu.removeprefix("NVIDIA ").split()[0].lower()


def write_result(name: str, result: Mapping[str, Any], parts: Sequence[str] | None = None) -> None:
    """Write what was found on the GPU that it names, beside what was found on others.

    Args:
        name: Of the file, before the GPU's.
        result: With the fields of a `BenchResult`.
        parts: The packages that were measured; all by default.
    """
    from fp8refit.bench import result as bench  # which a build that `run_interleaved.py` compares may lack

    found = bench.Findings(**bench.stamp(*[parts] if parts else []), **result)
    bench.write_result(found, RESULTS / f"{name}_{card(found.gpu)}.json")


def run_scenario(
    name: str,
    arguments: Sequence[object],
    *,
    out: Path,
    log: str,
    timeout_s: float,
    environment: Mapping[str, object] | None = None,
) -> dict:
    """Run a scenario until it ends, end every process that it leaves, also when told to end itself, and give the JSON in `out`.

    Raises:
        AssertionError: It failed; names its log.
        subprocess.TimeoutExpired: It took longer than `timeout_s`.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    process = started(name, arguments, out=out, log=log, environment=environment)
    try:
        code = process.wait(timeout_s)
    finally:
        ended(process)
        signal.signal(signal.SIGTERM, before)
    assert code == 0, f"{name} ended with {code}; see {RESULTS / log}.log"
    return json.loads(out.read_text())


def started(
    name: str, arguments: Sequence[object], *, out: Path, log: str, environment: Mapping[str, object] | None = None
) -> subprocess.Popen[bytes]:
    """Start a scenario that is to write `out`, in a session of its own; `ended` has to be called with it."""
    for folder in (out.parent, RESULTS):
        folder.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    command = [sys.executable, Path(__file__).with_name("run.py"), name, *arguments, "--out", out]
    with open(RESULTS / f"{log}.log", "w") as file:
        return subprocess.Popen(
            list(map(str, command)),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {key: str(value) for key, value in (environment or {}).items()},
        )


def ended(process: subprocess.Popen[bytes]) -> None:
    """End every process that a script leaves."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt  # which pytest does not take for a failed test, to go on with the next


_turn: list[int] = []


def wait_for_turn() -> None:
    """Measure alone: hold a lock on the file that `FP8REFIT_TURN` names, until this process ends. Engines boot side by side."""
    if file := os.environ.get("FP8REFIT_TURN"):
        _turn.append(os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC))
        fcntl.flock(_turn[-1], fcntl.LOCK_EX)
