"""Calibration of real engines against a pass of transformers' own model, in float32, over the same FP8 weights.

SGLang has no FP8 KV cache on a CPU: the engines hold BF16, and `claim_fp8_cache` (`faults.py`) has fp8refit believe otherwise.
What is measured and written is real; that attention reads it is not shown here.
"""

from typing import Any

import sglang
import torch
from engines import PROMPTS, generate, look, make_policy, traces
from fp8refit_sglang.kv_cache import casts_saturate
from torch import Tensor, nn

from fp8refit import Refitter, quantize_blockwise
from tests.tiny_models import make_model

BATCH = [*PROMPTS, PROMPTS[1][:5]]
MARGIN = 1.05 if casts_saturate(torch.device("cpu")) else 2.0
"""The default, by whether PyTorch's cast clamps for SGLang."""


def calibrate(engine: sglang.Engine, family: str) -> dict[str, Any]:
    """Refit an engine and calibrate it, then refit it again; what its ranks hold after each."""
    policy = calm_policy(family)
    Refitter(engine).refit(policy)
    hidden, outputs = traces(engine), generate(engine)
    look(engine, "claim_fp8_cache")
    Refitter(engine).close()  # so that its ranks are looked at again
    cache = look(engine, "cache_bytes")
    report = Refitter(engine).refit(policy, calibration=BATCH)
    found = {
        "is_cache_untouched": look(engine, "cache_bytes") == cache,
        "scales": report.kv.scales,
        "num_tokens": report.kv.num_tokens,
        "held": look(engine, "kv_scales"),
        "traces": sorted(traces(engine) - hidden),
        "says_the_same": generate(engine) == outputs,
        "expected": expected_scales(family, policy),
    }
    Refitter(engine).refit(policy)
    return found | {"held_after_a_refit": look(engine, "kv_scales")}


def calm_policy(family: str) -> dict[str, Tensor]:
    """Policy 1 with small queries: attention that is almost one-hot would turn the last bits of BF16 into percents."""
    policy = make_policy(family, 1)
    return {name: tensor / 16 if ".q_proj." in name else tensor for name, tensor in policy.items()}


@torch.inference_mode()
def expected_scales(family: str, policy: dict[str, Tensor]) -> dict[str, float]:
    """The scales that `BATCH` gives, by their checkpoint names."""
    model = make_model(family, 1)
    model.load_state_dict(policy)
    model.float()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.copy_(through_fp8(module.weight))
    caches = [model(input_ids=torch.tensor([ids]), use_cache=True).past_key_values for ids in BATCH]
    found = {}
    for index in range(len(caches[0].layers)):
        for kind, states in (("k", "keys"), ("v", "values")):
            amax = max(float(getattr(cache.layers[index], states).abs().max()) for cache in caches)
            found[f"model.layers.{index}.self_attn.{kind}_scale"] = MARGIN * amax / 448
    return found


def through_fp8(weight: Tensor) -> Tensor:
    """What block FP8 makes of a matrix."""
    codes, scale = quantize_blockwise(weight.to(torch.bfloat16), scale_format="fp32")
    return (
        codes.float() * scale.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
    )
