"""What `run_soak.py` does."""

import argparse
import gc
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import policies
import torch
import vllm
from measuring import log
from safetensors.torch import save_file
from tiny_models import FP8_CONFIG
from vllm import LLM, SamplingParams

import fp8refit
from fp8refit import EngineDirtyError, InvalidSourceError, NonFiniteError, RefitError, Refitter

HAS_GPU = torch.cuda.is_available()
KINDS = ("mapping", "mapping", "new memory", "mapping", "function", "mapping", "iterator", "mapping", "file", "mapping")
NORM = "model.norm.weight"
PROMPT = {"prompt_token_ids": [5, 80, 17, 200, 33, 101, 7, 7]}
NUM_LAST = 100


def boot(shape: str, work: Path) -> LLM:
    """A dummy engine; on a CPU with the tests' own kernel."""
    policies.write_config(shape, work / "dummy")
    options: dict = {"max_model_len": 2048}
    if not HAS_GPU:
        sys.path.append(str(Path(__file__).parents[1] / "vllm"))
        import cpu_kernel

        torch.compiler.set_stance("force_eager")
        cpu_kernel.register("fp32")
        options = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 512, "num_gpu_blocks_override": 64}
    return LLM(
        model=str(work / "dummy"),
        skip_tokenizer_init=True,
        max_num_seqs=4,
        gpu_memory_utilization=0.35 if HAS_GPU else 0.1,
        load_format="dummy",
        hf_overrides={"quantization_config": FP8_CONFIG},
        **options,
    )


def held() -> dict[str, int]:
    """What this process holds, and the GPU has left."""
    gc.collect()
    found = {
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "num_files": len(os.listdir("/proc/self/fd")),
        "num_threads": len(os.listdir("/proc/self/task")),
    }
    if HAS_GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        found["free_gpu_bytes"] = torch.cuda.mem_get_info()[0]
    return found


def places(llm: LLM) -> dict[str, int]:
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


def generate(llm: LLM) -> list[int]:
    sampling = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)
    return list(llm.generate([PROMPT], sampling, use_tqdm=False)[0].outputs[0].token_ids)


def error_of(step: Callable[[], object]) -> str:
    """The kind of error that a step raises; empty if it does not."""
    try:
        step()
    except RefitError as error:
        return type(error).__name__
    return ""


def run_soak(shape: str, work: Path, num_refits: int) -> dict:
    llm = boot(shape, work)
    refitter = Refitter(llm)
    sets = [policies.fill_policy(policies.allocate(shape), seed) for seed in (0, 1)]
    files = []
    for index, policy in enumerate(sets):
        files.append(work / f"policy-{index}.safetensors")
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
    before = places(llm)
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
                as_expected &= error_of(lambda: generate(llm)) == EngineDirtyError.__name__
            result["errors"].setdefault(name, []).append(as_expected)
        kind = KINDS[number // 2 % len(KINDS)]
        source = sources[kind](index)
        start_s = time.perf_counter()
        report = refitter.refit(source)
        result["refits"].append({"kind": kind, "s": time.perf_counter() - start_s, "version": report.version})
        del source
        if number % 20 in (0, 1):
            tokens = generate(llm)
            result["wrong_tokens"] += result["tokens"].setdefault(str(index), tokens) != tokens
        if number >= warm_up and number % step == 0:
            result["held"].append(held())
            log(f"{number} refits")
    result["held"].append(held())
    result["version"] = refitter.version
    result["moved"] = [name for name, place in places(llm).items() if before[name] != place]
    result["fingerprints"] = refitter.fingerprints()
    mapped_s = [row["s"] for row in result["refits"] if row["kind"] == "mapping"]
    result["median_s"] = statistics.median(mapped_s)
    result["median_of_the_last_s"] = statistics.median(mapped_s[-NUM_LAST:])
    return result


def run_once(shape: str, work: Path, num_refits: int) -> dict:
    refitter = Refitter(boot(shape, work))
    refitter.refit(policies.fill_policy(policies.allocate(shape), (num_refits - 1) % 2))
    return {"fingerprints": refitter.fingerprints()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["soak", "once"])
    parser.add_argument("--shape", required=True)
    parser.add_argument("--refits", type=int, default=1000)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    run = {"soak": run_soak, "once": run_once}[args.mode]
    result = run(args.shape, args.work, args.refits)
    result |= {
        "gpu": torch.cuda.get_device_name() if HAS_GPU else "none",
        "versions": {"fp8refit": fp8refit.__version__, "vllm": vllm.__version__, "torch": torch.__version__},
        "command": f"python {Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}",
        "shape": args.shape,
        "num_refits": args.refits,
    }
    args.out.write_text(json.dumps(result))
