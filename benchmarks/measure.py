"""Measures committed results again, by the commands that stand in them.

python -m benchmarks.measure --out DIR bench_refit_vllm_inside_qwen3-8b_h200.json ...
python -m benchmarks.measure --out DIR NAME.json='fp8refit bench refit --engine vllm ...'    # a new one

Needs the GPU and the engine of each. Writes DIR/NAME.json and DIR/NAME.log; copy what is good to benchmarks/results, then run
`benchmarks/stamp_results.py` and `benchmarks.render`.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FP8REFIT = (sys.executable, "-P", "-c", "from fp8refit.cli import app; app()")
"""The command line, where no script was installed."""


_ENDING_S = 30.0
"""How long a benchmark may take to end its engine, once it was told to."""


def main() -> None:
    """Measure all that was named, and say which did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="NAME.json, or NAME.json=COMMAND")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for each")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    named = (result.partition("=") for result in args.results)
    commands = {
        name: split(command or json.loads((RESULTS / name).read_text())["command"]) for name, _, command in named
    }
    failed = [name for name, command in commands.items() if not measure(args.out / name, *command, args.timeout_s)]
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


def measure(file: Path, variables: dict[str, str], arguments: list[str], timeout_s: float) -> bool:
    """Run one command, and keep its result if it has one."""
    start_s = time.monotonic()
    with file.with_suffix(".log").open("w") as errors:
        process = subprocess.Popen(
            [*FP8REFIT, *arguments, "--json"],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            said = end(process)
            errors.write(f"ended after {timeout_s} s\n")
    found = result_in(said) if process.returncode == 0 else None
    if found is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(f"{file.name}: exit code {process.returncode} after {time.monotonic() - start_s:.0f} s\n")
    return found is not None


def end(process: "subprocess.Popen[str]") -> str:
    """Let a benchmark end its engine, which may have processes of its own, and then whatever is left of it."""
    process.terminate()
    try:
        return process.communicate(timeout=_ENDING_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def result_in(said: str) -> Any:
    """The last line that is a result; None if there is none. Engines may print as they end."""
    for line in reversed(said.splitlines()):
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                return json.loads(line)
    return None


def split(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables that a command sets, and the arguments of `fp8refit`.

    Raises:
        ValueError: It runs another program.
    """
    words = shlex.split(command)
    start = next((place for place, word in enumerate(words) if not re.match(r"\w+=", word)), len(words))
    if words[start : start + 1] != ["fp8refit"]:
        raise ValueError(f"{command!r} is no command of fp8refit; run it by hand")
    return dict(word.split("=", 1) for word in words[:start]), words[start + 1 :]


if __name__ == "__main__":
    main()
