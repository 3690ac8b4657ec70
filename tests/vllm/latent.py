"""Engines with latent attention: what each rank holds through refits, and what fresh engines hold."""

from pathlib import Path
from typing import Any

import torch
from engines import PROMPTS, booted, booted_dummy, generate, kv_scales, live_bytes, make_policy, model_of, refused
from subject import NOISE, booted_as
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from fp8refit import Refitter
from fp8refit.checkpoint import quantize_checkpoint
from tests.engines.attempts import try_policies
from tests.tiny_models import save_model

SCALES = [
    {f"model.layers.{layer}.self_attn.k_scale": (layer + 1) * scale for layer in range(2)} for scale in (0.5, 0.004)
]
"""Of the latents of each layer. With the second, some latents do not fit."""


def run_latent(layout: str, family: str, kernel: str, work: str) -> dict:
    """One engine from noise through policies."""
    with booted_as(layout, Path(work) / f"{family}-bf16", kernel, **NOISE) as subject:
        return {"policies": try_policies(subject, family), "layout": subject.layout().model_dump(mode="json")}


def run_fresh_latent(layout: str, family: str, kernel: str, work: str) -> dict:
    """One engine that loads the block-FP8 checkpoint of policy 2."""
    with booted_as(layout, Path(work) / f"{family}-{kernel}", kernel) as subject:
        return subject.state()


def run_latent_cache(family: str, work: str) -> dict:
    """Engines with latents in FP8: one from noise, given scales alone, with weights and among weights; one of a checkpoint."""
    bf16, fp8 = Path(work) / f"{family}-bf16", Path(work) / f"{family}-fp8"
    save_model(family, 2, bf16)
    quantize_checkpoint(bf16, fp8)
    policy, (first, second) = make_policy(family, 2), SCALES
    with booted_dummy(bf16, "fp32", kv_cache_dtype="fp8") as llm:
        refitter = Refitter(llm)
        refitter.refit(policy)
        found: dict[str, Any] = {"ones": {"copies": kv_scales(llm), **generate(llm), "live": live_bytes(llm)}}
        refitter.refit(make_policy(family, 1), kv_scales=first)
        found["given"] = {"copies": kv_scales(llm), **generate(llm)}
        report = refitter.refit(policy | {name: torch.tensor(scale) for name, scale in second.items()})
        found["sent"] = {"copies": kv_scales(llm), **generate(llm), "live": live_bytes(llm)}
        found["reported"] = report.kv.scales
        refitter.refit(make_policy(family, 1))
        found["kept"] = kv_scales(llm)
        found["measured"] = refused(lambda: refitter.refit(policy, calibration=PROMPTS))
        broken = policy | {"model.norm.weight": policy["model.norm.weight"] * float("nan")}
        found["broken"] = refused(lambda: refitter.refit(broken | {name: torch.tensor(2.0) for name in second}))
        refitter.refit(policy)
        found["healed"] = {"copies": kv_scales(llm), **generate(llm), "live": live_bytes(llm)}
    with booted(fp8, "fp32", kv_cache_dtype="fp8") as llm:
        found["fresh"] = {"ones": {"copies": kv_scales(llm), **generate(llm), "live": live_bytes(llm)}}
        assert llm.reset_prefix_cache()
        set_as_at_boot(llm, second)
        found["fresh"]["sent"] = {"copies": kv_scales(llm), **generate(llm), "live": live_bytes(llm)}
        return found


def set_as_at_boot(llm, scales: dict[str, float]) -> None:
    """What vLLM's own method for KV scales does with those of a checkpoint. It is asked for latents with ModelOpt's alone."""
    method = BaseKVCacheMethod(None)
    for name, scale in scales.items():
        layer = model_of(llm).get_submodule(name.replace(".k_scale", ".mla_attn.mla_attn"))
        assert type(layer).__name__ == "MLAAttention"
        method.create_weights(layer)
        layer.k_scale.data.fill_(scale)
        method.process_weights_after_loading(layer)
