"""What the engines of the scripts here are asked, and the rate that their fills are held against. Imports no engine."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from fp8refit import EngineAsleepError, Refitter
from fp8refit.bench.clock import copy_gb_per_s

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

T = TypeVar("T")
PROMPTS = [[(31 * i + 7 * j) % 50000 + 100 for j in range(24 + 8 * i)] for i in range(4)]
START_S = time.perf_counter()


def log(what: str) -> None:
    print(f"{time.perf_counter() - START_S:7.1f} s  {what}", flush=True)


def vllm_sampling() -> "SamplingParams":
    """Greedy, with log-probabilities of prompt and output."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=24, temperature=0, logprobs=4, prompt_logprobs=0, detokenize=False, ignore_eos=True
    )


def generate(llm: "LLM") -> dict:
    """Greedy tokens and every log-probability of vLLM's, as exact hexadecimal floats."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], vllm_sampling(), use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            [{str(token): entry.logprob.hex() for token, entry in step.items()} for step in output.outputs[0].logprobs]
            for output in outputs
        ],
        "prompt_logprobs": [
            [
                {str(token): entry.logprob.hex() for token, entry in step.items()}
                for step in output.prompt_logprobs
                if step
            ]
            for output in outputs
        ],
    }


def timed_refit(refitter: Refitter, policy: dict) -> dict:
    """Refit, once the GPU is done with all else, and give the seconds that it took here and on every rank."""
    wait_for_gpu()
    start_s = time.perf_counter()
    report = refitter.refit(policy)
    wall_s = time.perf_counter() - start_s
    device_s = [rank.fill_device_s for rank in report.ranks if rank.fill_device_s is not None]
    return {
        "wall_s": wall_s,
        "host_s": wall_s - max(device_s, default=0.0),
        "phases_s": report.phases_s,
        "version": report.version,
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


def is_refused(refitter: Refitter, policy: dict) -> bool:
    """Whether the engine's weights sleep."""
    try:
        refitter.refit(policy)
    except EngineAsleepError:
        return True
    return False


def wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Callable[[], T]) -> tuple[T, float, int]:
    """What a call gave, the seconds that it took with everything synchronised before and after, and the bytes of GPU memory
    that it took at most beyond what was held.
    """
    has_gpu = torch.cuda.is_available()
    wait_for_gpu()
    if has_gpu:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if has_gpu else 0
    start_s = time.perf_counter()
    found = call()
    wait_for_gpu()
    seconds = time.perf_counter() - start_s
    return found, seconds, torch.cuda.max_memory_allocated() - held if has_gpu else 0


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def measure_copy_gb_per_s(device: int) -> float:
    """The copy roofline of a GPU, as the benchmark measures it."""
    return copy_gb_per_s(torch.device("cuda", device), repeats=9)
