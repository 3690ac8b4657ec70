"""Scripts that have an engine in several ways, in a process for each. They boot side by side and measure one after the other.

The command line has `--way`, or another name, for one way alone, and `--here` for the process that measures it.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from run import VLLM, reach_tests


def parser_of(option: str, ways: Mapping[str, Any], *, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument(f"--{option}", choices=ways)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--here", action="store_true", help="in this process, which then is the engine's")
    return parser


def run(
    arguments: argparse.Namespace,
    option: str,
    ways: Mapping[str, Mapping[str, str]],
    measure: Callable[[argparse.Namespace], None],
    show: Callable[[dict], None],
    **about: Any,
) -> None:
    """Measure in this process, or start one for each way and gather what they wrote, and how they ended.

    Args:
        arguments: As `parser_of` parses them, and others.
        option: What says a way.
        ways: With the environment of each.
        measure: Writes what it finds to `arguments.out`, again and again.
        show: Prints all results.
        about: What the result says beside them.
    """
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.here:
        reach_tests()
        measure(arguments)
        return
    os.environ.setdefault("FP8REFIT_TURN", str(arguments.out.with_suffix(".turn")))
    started = {}
    for way in [asked] if (asked := getattr(arguments, option)) else ways:
        part = arguments.out.with_name(f"{arguments.out.stem}.{way}.part.json")
        part.unlink(missing_ok=True)
        command = [sys.executable, *sys.argv, f"--{option}", way, "--here", "--out", str(part)]  # the last ones count
        started[way] = subprocess.Popen(command, env=environment(ways[way])), part
    codes, results = [], {}
    for way, (process, part) in started.items():
        codes.append(abs(process.wait()))
        results[way] = json.loads(part.read_text()) if part.exists() else {}
        part.unlink(missing_ok=True)
        found = {"command": f"python {' '.join(sys.argv)}", "shape": arguments.shape, f"{option}s": results, **about}
        save(arguments.out, found | stamped(results))
    show(results)
    sys.exit(max(codes))


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """Of a process that measures; before vLLM and what it starts."""
    return os.environ | VLLM | own


def stamped(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The other fields of a `BenchResult`."""
    from fp8refit.bench.result import stamp

    some = next(filter(None, results.values()), {})
    return {name: some[name] for name in ("gpu", "versions") if name in some} | stamp()


def save(out: Path, found: dict) -> None:
    out.write_text(json.dumps(found, indent=1) + "\n")
