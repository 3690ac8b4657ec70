"""One vLLM engine in this process that is refitted over and over.

soak   refits of every kind, requests between some
once   the last of those policies, in one refit
"""

import gc
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import policies
import torch
from harness import WHOLE, free_bytes, log, time_call
from live_engines import HAS_GPU, Vllm
from safetensors.torch import save_file

from fp8refit import EngineDirtyError, InvalidSourceError, NonFiniteError, RefitError, Refitter

KINDS = ("mapping", "mapping", "new memory", "mapping", "function", "mapping", "iterator", "mapping", "file", "mapping")
NORM = "model.norm.weight"
PROMPTS = [[5, 80, 17, 200, 33, 101, 7, 7]]
NUM_LAST = 100


def boot(args) -> Vllm:
    policies.write_config(args.shape, args.work / "dummy")
    return Vllm(args.work / "dummy", is_inside=True, is_noise=True, is_compiled=True)


def held() -> dict[str, int]:
    """What this process holds, and the GPU has left."""
    gc.collect()
    found = {
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "num_files": len(os.listdir("/proc/self/fd")),
        "num_threads": len(os.listdir("/proc/self/task")),
    }
    if HAS_GPU:
        torch.cuda.empty_cache()
        found["free_gpu_bytes"] = free_bytes()
    return found


def error_of(step: Callable[[], object]) -> str:
    """The kind of error that a step raises; empty if it does not."""
    try:
        step()
    except RefitError as error:
        return type(error).__name__
    return ""


def run_soak(args) -> dict:
    engine, num_refits = boot(args), args.refits
    refitter = Refitter(engine.candidate)
    sets = [policies.fill_policy(policies.allocate(args.shape), seed) for seed in (0, 1)]
    files = []
    for index, policy in enumerate(sets):
        files.append(args.work / f"policy-{index}.safetensors")
        save_file({name: tensor.cpu() for name, tensor in policy.items()}, files[-1])
    soiled = {**sets[0], NORM: torch.full_like(sets[0][NORM], torch.nan)}
    incomplete = {name: tensor for name, tensor in sets[0].items() if name != NORM}
    sources = {
        "mapping": lambda index: sets[index],
        "new memory": lambda index: {name: tensor.clone() for name, tensor in sets[index].items()},
        "function": lambda index: lambda: iter(sets[index].items()),
        "iterator": lambda index: iter(sets[index].items()),
        "file": lambda index: files[index],
    }
    result: dict = {"refits": [], "tokens": {}, "wrong_tokens": 0, "errors": {}, "held": []}
    refitter.refit(sets[0])
    (before,) = engine.ask("places")
    warm_up, step = num_refits // 10, max(num_refits // 10, 1)
    for number in range(1, num_refits):
        index = number % 2
        failures = {
            7: ("incomplete", lambda: refitter.refit(incomplete), InvalidSourceError),
            13: ("NaN", lambda: refitter.refit(soiled), NonFiniteError),
        }
        if number % 25 in failures:
            name, attempt, expected = failures[number % 25]
            as_expected = error_of(attempt) == expected.__name__
            if refitter.is_dirty:
                as_expected &= error_of(lambda: engine.say(PROMPTS, 4)) == EngineDirtyError.__name__
            result["errors"].setdefault(name, []).append(as_expected)
        kind = KINDS[number // 2 % len(KINDS)]
        source = sources[kind](index)
        seconds, _, report = time_call(partial(refitter.refit, source))
        result["refits"].append({"kind": kind, "s": seconds, "version": report.version})
        del source
        if number % 20 in (0, 1):
            (tokens,) = engine.say(PROMPTS, 4)
            result["wrong_tokens"] += result["tokens"].setdefault(str(index), tokens) != tokens
        if number >= warm_up and number % step == 0:
            result["held"].append(held())
            log(f"{number} refits")
    result["held"].append(held())
    result["version"] = refitter.version
    (now,) = engine.ask("places")
    result["moved"] = [name for name, place in now.items() if before[name] != place]
    result["fingerprints"] = refitter.fingerprints()
    mapped_s = [row["s"] for row in result["refits"] if row["kind"] == "mapping"]
    result["median_s"] = statistics.median(mapped_s)
    result["median_of_the_last_s"] = statistics.median(mapped_s[-NUM_LAST:])
    return result | {"shape": args.shape, "num_refits": num_refits}


def run_once(args) -> dict:
    refitter = Refitter(boot(args).candidate)
    refitter.refit(policies.fill_policy(policies.allocate(args.shape), (args.refits - 1) % 2))
    return {"fingerprints": refitter.fingerprints()}


OPTIONS = {"refits": WHOLE | {"default": 1000}}
MODES = {"soak": run_soak, "once": run_once}
