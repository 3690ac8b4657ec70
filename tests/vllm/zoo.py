"""Families of every kind: what a refitted engine holds, and what one that loads the same BF16 checkpoint holds, quantized.

That other engine quantizes nothing: its own loader has put every value into its place, and the public quantizer makes of that
what a block-FP8 engine has to hold. So the oracle knows neither slots nor traces, and no family needs a checkpoint in FP8.
"""

import gc
import hashlib
import json
from pathlib import Path

import torch
from engines import booted, booted_dummy, generate, make_policy, model_of, scribble
from torch import Tensor
from vllm.model_executor.model_loader import base_loader

from fp8refit import RefitError, Refitter, quantize_blockwise
from tests.tiny_models import save_model

MUTE = ("jamba",)
"""There is no selective scan on a CPU."""
_KV_SCALES = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")


def run_zoo(families: list[str], work: str) -> dict:
    """Each family for itself: one that fails says how, and the others go on."""
    policies = {}
    for family in families:  # not later: booting changes the models of transformers that it serves itself
        save_model(family, 2, Path(work) / family)
        policies[family] = [make_policy(family, seed) for seed in (1, 2)]
    return {family: run_family(family, Path(work) / family, policies.pop(family)) for family in families}


def run_family(family: str, folder: Path, policies: list[dict[str, Tensor]]) -> dict:
    try:
        loaded = loaded_by_vllm(folder)
        gc.collect()
        with booted_dummy(folder, "fp32") as llm:
            before = traces_of(llm)
            refitter = Refitter(llm)
            layout = refitter.layout()
            found = {"left": before == traces_of(llm), "refusals": layout.refusals}
            refitter.refit(policies[0])
            found["before"] = said_by(llm, family)
            refitter.refit(policies[1])
            found |= {"generated": said_by(llm, family), "wrong": wrong(model_of(llm).state_dict(), loaded)}
            scribble(llm)
            refitter.refit(folder)
            found["wrong_from_files"] = wrong(model_of(llm).state_dict(), loaded)
            quantized = [name for name in model_of(llm).state_dict() if name.endswith("_scale_inv")]
            return found | {"num_quantized": len(quantized)}
    except (RefitError, ValueError, RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def loaded_by_vllm(folder: Path) -> dict[str, Tensor]:
    """What vLLM's loader makes of a BF16 checkpoint, before a kernel has anything of it."""
    loaded: dict[str, Tensor] = {}
    process = base_loader.process_weights_after_loading

    def keep_and_process(model, *arguments) -> None:
        loaded.update((name, tensor.clone()) for name, tensor in model.state_dict().items())
        process(model, *arguments)

    base_loader.process_weights_after_loading = keep_and_process
    try:
        with booted(folder, "fp32"):
            return loaded
    finally:
        base_loader.process_weights_after_loading = process


def said_by(llm, family: str) -> list | None:
    """Tokens and log-probabilities; None of a model that vLLM has no kernel for on a CPU."""
    return None if family in MUTE else generate(llm)["outputs"]


def wrong(live: dict[str, Tensor], loaded: dict[str, Tensor]) -> list[str]:
    """Live tensors that are not what the other engine's make them."""
    bad = []
    for name, tensor in live.items():
        weight = name.removesuffix("_scale_inv")
        if name.endswith(_KV_SCALES):
            continue
        expected = loaded.get(weight)
        if expected is None:
            bad.append(name)
            continue
        if f"{weight}_scale_inv" in live:
            codes, scale = quantized(expected, is_w13=weight.endswith("w13_weight"))
            expected = scale if name != weight else codes
        same_kind = (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
        if not same_kind or not torch.equal(raw(tensor), raw(expected)):
            bad.append(name)
    return bad


def quantized(weight: Tensor, *, is_w13: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix, or of each expert's."""
    if weight.ndim == 2:
        return quantize_blockwise(weight)
    halves = [expert.chunk(2) if is_w13 else (expert,) for expert in weight]
    pairs = [[quantize_blockwise(half) for half in expert] for expert in halves]
    codes = torch.stack([torch.cat([code.view(torch.uint8) for code, _ in expert]) for expert in pairs])
    return codes.view(torch.float8_e4m3fn), torch.stack([torch.cat([s for _, s in expert]) for expert in pairs])


def traces_of(llm) -> str:
    """What a twin might leave in this process: layers that registered themselves, and rotary embeddings that are shared."""
    from vllm.model_executor.layers import rotary_embedding

    config = llm.llm_engine.vllm_config.compilation_config
    held = {name: id(layer) for name, layer in config.static_forward_context.items()}
    shared = {str(key): id(module) for key, module in rotary_embedding._ROPE_DICT.items()}
    names = list(getattr(config, "static_all_moe_layers", []))
    return hashlib.sha256(json.dumps([held, shared, names, str(config.mode)]).encode()).hexdigest()


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
