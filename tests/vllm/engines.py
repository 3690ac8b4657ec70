"""Tiny vLLM engines on the CPU: boot one in this process, see what it says and holds and refuses, and let go of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cpu_kernel
import observer
import torch
from observer import KV_SCALES
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from fp8refit import RefitError, dequantize_blockwise, quantize_blockwise
from tests.engines.containers import CONFIGS
from tests.engines.looking import raw
from tests.engines.subject import make_policy
from tests.tiny_models import FP8_CONFIG, VOCAB_SIZE

__all__ = ["KV_SCALES", "make_policy"]

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
ABSORBED = {"W_UK_T": lambda heads: heads[:, :128], "W_UV": lambda heads: heads[:, 128:].transpose(1, 2)}
"""Of a latent projection (N, P + V, L): keys (N, P, L) and values (N, L, V)."""
ROUTERS = [f"model.layers.{layer}.{name}" for layer in range(2) for name in ("mlp.gate", "block_sparse_moe.gate")]
"""Which experts a token goes to; no checkpoint quantizes it."""
CONFIG = FP8_CONFIG | {"modules_to_not_convert": [*FP8_CONFIG["modules_to_not_convert"], *ROUTERS]}
SCALES = "weight_scale_inv", "weight_scale"
CONTAINERS = {"": CONFIG} | CONFIGS
"""By what is after a `+` in a kernel's name."""
PROMPTS = [[(31 * i + 7 * j) % 256 for j in range(length)] for i, length in enumerate((24, 40, 200))]
"""The last is longer than one block of the prefix cache, which is 128 tokens on a CPU."""
SAMPLING = SamplingParams(max_tokens=6, temperature=0, logprobs=4, detokenize=False, ignore_eos=True)


def settings(model: Path) -> dict:
    """What all tiny engines are booted with."""
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 64,  # of 128 tokens; clearing the GiB that they are cut from takes a while
        "skip_tokenizer_init": True,
    }


IN_PROCESS = {"distributed_executor_backend": UniProcExecutor}
"""By its class: for the name, vLLM 0.22 takes another on a CPU."""


@contextmanager
def booted(model: Path, kernel: str, **options) -> Iterator[LLM]:
    """An engine whose block-FP8 layers use `kernel`; one lives at a time."""
    cpu_kernel.register(kernel.partition("+")[0])
    llm = LLM(**settings(model) | IN_PROCESS | options)
    yield llm
    # Now, not when it is collected: that would take the process groups from under the engine booted next.
    llm.llm_engine.engine_core.shutdown()


def booted_dummy(model: Path, kernel: str, **options):
    """A block-FP8 engine of `model`'s shape, with noise for weights."""
    config = CONTAINERS[kernel.partition("+")[2]]
    return booted(model, kernel, load_format="dummy", hf_overrides={"quantization_config": config}, **options)


def generate(llm: LLM) -> dict:
    """Greedy tokens, every log-probability as an exact hexadecimal float, and tokens that the prefix cache gave."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], SAMPLING, use_tqdm=False)
    return {"outputs": [said(output) for output in outputs], "num_cached": [o.num_cached_tokens for o in outputs]}


def said(output) -> dict:
    """Tokens and log-probabilities of one finished request."""
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [{str(t): entry.logprob.hex() for t, entry in step.items()} for step in completion.logprobs],
    }


def state(llm: LLM) -> dict:
    """What it holds and says."""
    return {"live": live_bytes(llm), **generate(llm)}


def refused(call, *arguments, error_type: type[Exception] = RefitError) -> dict | None:
    """Which error `call` raises, how soon, and what it names; None if it returns."""
    start_s = time.perf_counter()
    try:
        call(*arguments)
    except error_type as error:
        named = [getattr(error, field, ()) for field in ("names", "problems", "reasons")]
        return {
            "error": type(error).__name__,
            "message": str(error),
            "named": [line for lines in named for line in lines],
            "seconds": time.perf_counter() - start_s,
        }
    return None


def model_of(llm: LLM) -> nn.Module:
    return worker_of(llm).model_runner.get_model()


def worker_of(llm: LLM) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker


def live_bytes(llm: LLM) -> dict[str, str]:
    return observer.live_bytes(worker_of(llm))


def places(llm: LLM) -> dict[str, list]:
    return observer.places(worker_of(llm))


def kv_scales(llm: LLM) -> dict[str, float]:
    return observer.kv_scales(worker_of(llm))


def num_padding_bytes_set(llm: LLM) -> int:
    """Bytes that are not zero in rows after the vocabulary's own."""
    vocabulary = [
        t for name, t in model_of(llm).state_dict().items() if name in ("model.embed_tokens.weight", "lm_head.weight")
    ]
    assert all(tensor.shape[0] > VOCAB_SIZE for tensor in vocabulary), "vLLM pads a vocabulary of this size"
    return sum(int(raw(tensor[VOCAB_SIZE:]).count_nonzero()) for tensor in vocabulary)


def scribble(llm: LLM) -> None:
    observer.scribble(worker_of(llm))


def wrong_tensors(llm: LLM, policy: dict[str, Tensor], scale_format: str) -> list[str]:
    """Live tensors whose bytes are not what `policy` makes of them; looks at neither slots nor plan."""
    scale_format = scale_format.partition("+")[0]
    live = model_of(llm).state_dict()
    return [name for name in live if not torch.equal(raw(live[name]), raw(_expected(name, live, policy, scale_format)))]


def _expected(name: str, live: dict[str, Tensor], policy: dict[str, Tensor], scale_format: str) -> Tensor:
    """What the live tensor called `name` must hold."""
    module, _, leaf = name.rpartition(".")
    if leaf in KV_SCALES:
        return torch.ones((), dtype=torch.float32)
    module = module.replace(".mla_attn", "")
    if leaf in ABSORBED:
        quantized = quantize_blockwise(policy[f"{module}.kv_b_proj.weight"], scale_format=scale_format)
        return ABSORBED[leaf](dequantize_blockwise(*quantized, dtype=torch.bfloat16).unflatten(0, (-1, 256)))
    parent, _, last = module.rpartition(".")
    is_scale = leaf in SCALES
    source = "weight" if is_scale else leaf
    fused = () if f"{module}.{source}" in policy else FUSED.get(last, ())
    parts = [policy[f"{parent}.{part}.{source}".lstrip(".")] for part in fused or (last,)]
    if is_scale or (leaf == "weight" and any(f"{module}.{scale}" in live for scale in SCALES)):
        quantized = [quantize_blockwise(part, scale_format=scale_format) for part in parts]
        parts = [scale if is_scale else codes.view(torch.uint8) for codes, scale in quantized]
    tensor = torch.cat(parts)
    padding = live[name].shape[0] - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros((padding, *tensor.shape[1:]))])
