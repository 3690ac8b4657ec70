"""Engines with an FP8 KV cache, and what calibration does to what they say and hold. `test_kv_cache.py` judges it.

Errors are those of log-probabilities of prompts, against an engine of the same weights whose KV cache is BF16.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engines import KV_SCALES, PROMPTS, booted_dummy, kv_scales, live_bytes, model_of, places, refused
from torch import Tensor
from vllm import LLM, SamplingParams

from fp8refit import Refitter
from tests.outliers import BATCH, calm_policy, with_larger_keys, with_outliers
from tests.tiny_models import save_model

QWEN, LLAMA = "qwen3_deep", "llama_deep"
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
TEACHER_FORCED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
ATTENTIONS = [f"model.layers.{index}.self_attn" for index in range(4)]
LAST_ATTENTION = ATTENTIONS[-1]
ONES = {f"{name}.{kind}_scale": 1.0 for name in ATTENTIONS for kind in ("k", "v")}
POLICIES: dict[str, dict[str, Callable[[], dict[str, Tensor]]]] = {
    QWEN: {"base": lambda: calm_policy(QWEN, 2), "outliers": lambda: with_outliers(calm_policy(QWEN, 2))},
    LLAMA: {"base": lambda: calm_policy(LLAMA, 2), "larger keys": lambda: with_larger_keys(calm_policy(LLAMA, 2), 8)},
}


def run_kv_cache(work: str) -> dict:
    """Engines of two families, with a BF16 KV cache and with an FP8 one."""
    found: dict[str, Any] = {"said": {}}
    for family, policies in POLICIES.items():
        save_model(family, 1, Path(work) / family)
        with booted_dummy(Path(work) / family, "fp32") as llm:
            refitter = Refitter(llm)
            found["said"][family] = {}
            for name, make_policy in policies.items():
                refitter.refit(make_policy())
                found["said"][family][name] = teacher_forced(llm)
            if family == QWEN:
                found["without"] = try_without_fp8_cache(llm, refitter)
    for family, attempts in ATTEMPTS.items():
        with booted_dummy(Path(work) / family, "fp32", kv_cache_dtype="fp8") as llm:
            refitter = Refitter(llm)
            for name, attempt in attempts.items():
                found[name] = attempt(llm, refitter)
    return found


def teacher_forced(llm: LLM) -> list[float]:
    """The log-probability of every token of `BATCH` after those before it."""
    prompts = [{"prompt_token_ids": prompt} for prompt in BATCH]
    outputs = llm.generate(prompts, TEACHER_FORCED, use_tqdm=False)
    return [
        entries[token].logprob
        for prompt, output in zip(BATCH, outputs, strict=True)
        for token, entries in list(zip(prompt, output.prompt_logprobs, strict=True))[1:]
    ]


def answer(llm: LLM) -> int:
    """How many tokens it says to a short prompt."""
    (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, ONE_TOKEN, use_tqdm=False)
    return len(output.outputs[0].token_ids)


def scribble_scales(llm: LLM) -> None:
    """Noise in every copy of every KV scale, as a dummy boot leaves it where vLLM does not look after them."""
    for module in model_of(llm).modules():
        if hasattr(module, "_k_scale_float"):
            for name, value in (vars(module) | module._buffers).items():
                if name.startswith(KV_SCALES) and isinstance(value, Tensor):
                    value.fill_(0.3)
                elif name.startswith(KV_SCALES) and value is not None:
                    setattr(module, name, 0.3)


def traces(llm: LLM) -> list[str]:
    """What a calibration left on the engine and its modules."""
    left = [name for name, module in model_of(llm).named_modules() if "forward" in vars(module)]
    return left + [name for name in vars(llm.llm_engine) if name == "add_request"]


def try_without_fp8_cache(llm: LLM, refitter: Refitter) -> dict:
    """Scales for an engine whose KV cache is BF16: to be measured, and among the weights."""
    policy, before = calm_policy(QWEN, 2), [live_bytes(llm), kv_scales(llm), refitter.version]
    found: dict[str, Any] = {"refused": refused(lambda: refitter.refit(policy, calibration=BATCH))}
    found["untouched"] = [live_bytes(llm), kv_scales(llm), refitter.version] == before
    found |= {"dirty": refitter.is_dirty, "serves": answer(llm), "traces": traces(llm)}
    report = refitter.refit({**policy, f"{LAST_ATTENTION}.k_scale": torch.tensor(2.0)})
    return found | {"ignored": report.ignored, "kv": report.kv, "scales_untouched": kv_scales(llm) == before[1]}


def try_first_refit(llm: LLM, refitter: Refitter) -> dict:
    """Weights and scales are noise; the first refit calibrates already."""
    scribble_scales(llm)
    booted, before = kv_scales(llm), places(llm)
    report = refitter.refit(POLICIES[QWEN]["outliers"](), calibration=BATCH)
    found = {"booted": booted, "copies": kv_scales(llm), "moved": places(llm) != before, "traces": traces(llm)}
    return found | {"scales": report.kv.scales, "version": report.version}


def try_policies(llm: LLM, refitter: Refitter) -> dict:
    """What each policy says with scales of 1, and calibrated."""
    found = {}
    for name, make_policy in POLICIES[QWEN].items():
        policy = make_policy()
        refitter.refit(policy, kv_scales=ONES)
        found[name] = {"ones": teacher_forced(llm)}
        report = refitter.refit(policy, calibration=BATCH)
        found[name] |= {"calibrated": teacher_forced(llm), "scales": report.kv.scales}
    return found


def try_failing_pass(llm: LLM, refitter: Refitter) -> dict:
    """A calibration pass that raises in the third layer, after the weights were written; then a refit that heals."""

    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    mlp = model_of(llm).model.layers[2].mlp
    mlp.__dict__["forward"] = fail
    found: dict[str, Any] = {
        "refused": refused(lambda: refitter.refit(calm_policy(QWEN, 3), calibration=BATCH), error_type=Exception)
    }
    del mlp.__dict__["forward"]
    found |= {"dirty": refitter.is_dirty, "hooks": [name for name in traces(llm) if name != "add_request"]}
    report = refitter.refit(calm_policy(QWEN, 2), calibration=BATCH)
    found |= {"still_dirty": refitter.is_dirty, "serves": answer(llm), "traces": traces(llm)}
    return found | {"scales": report.kv.scales, "copies": kv_scales(llm)}


def try_larger_keys(llm: LLM, refitter: Refitter) -> dict:
    """A policy of larger keys under the scales of the one before, and under its own."""
    base, larger = (make_policy() for make_policy in POLICIES[LLAMA].values())
    found: dict[str, Any] = {"base": refitter.refit(base, calibration=BATCH).kv.scales}
    found["base calibrated"] = teacher_forced(llm)
    refitter.refit(larger)
    found["stale"] = teacher_forced(llm)
    found["larger"] = refitter.refit(larger, calibration=BATCH).kv.scales
    return found | {"calibrated": teacher_forced(llm)}


ATTEMPTS: dict[str, dict[str, Callable[[LLM, Refitter], dict]]] = {
    QWEN: {"first refit": try_first_refit, "policies": try_policies, "failing pass": try_failing_pass},
    LLAMA: {"larger keys": try_larger_keys},
}
