"""Runs the scripts beside it, each an engine in processes of its own, and gives what they wrote. Imports no fp8refit."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

RESULTS = Path(os.environ.get("FP8REFIT_RESULTS", "benchmarks/results"))
"""Where tests leave JSON and logs."""


def card(gpu: str) -> str:
    """`h200` of `NVIDIA H200`."""
    return gpu.removeprefix("NVIDIA ").split()[0].lower()


def write_result(name: str, result: Mapping[str, object]) -> None:
    """Write what was found on the GPU that it names, beside what was found on others."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}_{card(str(result['gpu']))}.json").write_text(json.dumps(result, indent=1) + "\n")


def run_script(
    script: str,
    arguments: Sequence[object],
    *,
    out: Path,
    log: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> dict:
    """Run a script until it ends, end every process that it leaves, also when told to end itself, and give the JSON in `out`.

    Raises:
        AssertionError: It failed; names its log.
        subprocess.TimeoutExpired: It took longer than `timeout_s`.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    process = started(script, arguments, out=out, log=log, environment=environment)
    try:
        code = process.wait(timeout_s)
    finally:
        ended(process)
        signal.signal(signal.SIGTERM, before)
    assert code == 0, f"{script} ended with {code}; see {log}"
    return json.loads(out.read_text())


def started(
    script: str,
    arguments: Sequence[object],
    *,
    out: Path,
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a script that is to write `out`, in a session of its own; `ended` has to be called with it."""
    for file in (out, log):
        file.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    command = [sys.executable, Path(__file__).with_name(script), *arguments, "--out", out]
    with open(log, "w") as file:
        return subprocess.Popen(
            list(map(str, command)),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | dict(environment or {}),
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
