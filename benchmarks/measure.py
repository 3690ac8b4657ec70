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
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
FP8REFIT = (sys.executable, "-P", "-c", "from fp8refit.cli import app; app()")
"""The command line, where no script was installed."""


def main() -> None:
    """Measure all that was named, and say which did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="NAME.json, or NAME.json=COMMAND")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for each")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = [each.partition("=")[0] for each in args.results if not measure(each, args.out, args.timeout_s)]
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


def measure(result: str, out: Path, timeout_s: float) -> bool:
    """Run one command, and keep its result."""
    name, _, command = result.partition("=")
    variables, arguments = split(command or json.loads((RESULTS / name).read_text())["command"])
    start_s, log = time.monotonic(), out / f"{Path(name).stem}.log"
    with log.open("w") as errors:
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
            os.killpg(process.pid, 9)
            said, _ = process.communicate()
            errors.write(f"ended after {timeout_s} s\n")
    if process.returncode == 0:  # engines print to standard output too
        (out / name).write_text(json.dumps(json.loads(said.splitlines()[-1]), indent=1) + "\n")
    sys.stdout.write(f"{name}: exit code {process.returncode} after {time.monotonic() - start_s:.0f} s\n")
    return process.returncode == 0


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
