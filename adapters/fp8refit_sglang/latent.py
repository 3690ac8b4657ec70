"""Latent attention (MLA) in SGLang: the absorbed copies of `kv_b_proj`.

On CUDA, SGLang dequantizes `kv_b_proj` and keeps its two parts as plain attributes, `w_kc` and `w_vc`. Copies that it
quantizes again or gathers from other ranks are refused.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.tracing.rules import Why
from fp8refit_sglang.experts import FROM_FP8, quantizes_itself

ABSORBED = _KEYS, _VALUES = "w_kc", "w_vc"
_KNOWN_RULES = tuple(
    f"{owner}.post_load_weights" for owner in ("DeepseekV2WeightLoaderMixin", "DeepseekV3ForCausalLMNextN")
)
"""The second calls the first, for the layer that drafts tokens."""
_SCALES = ("w_scale", "w_scale_k", "w_scale_v")
_OF_OTHER_RANKS = ("w_kc_qrep", "q_b_proj_qrep", "q_b_proj_qrep_weight")


def is_latent(module: nn.Module) -> bool:
    """Whether `module` is an attention layer that may keep absorbed copies."""
    return hasattr(module, _KEYS)


def has_known_rule(model: nn.Module) -> bool:
    """Whether `model` makes its absorbed copies like DeepSeek's models; others scale them."""
    rule = getattr(type(model), "post_load_weights", None)
    return getattr(rule, "__qualname__", "") in _KNOWN_RULES


def why_not_absorbed(module: Any, *, is_known_rule: bool) -> Why:
    """Why the absorbed copies of an attention layer cannot be recomputed; None if they can."""
    if not is_known_rule:
        return "absorbs its latent projections in a way of its own", "fp8refit does not support it yet"
    projection = getattr(module, "kv_b_proj", None)
    if quantizes_itself(getattr(projection, "base_layer", projection)):
        return "absorbs its latent projections before SGLang quantizes them", FROM_FP8
    if getattr(module, "use_deep_gemm_bmm", False):
        return (
            "keeps absorbed copies in FP8 for DeepGEMM",
            "Boot without SGLANG_USE_DEEPGEMM_BMM, SGL_USE_DEEPGEMM_BMM in older versions",
        )
    if any(getattr(module, name, None) is not None for name in _OF_OTHER_RANKS):
        return "also keeps the absorbed keys of other ranks", "Boot without dcp_replicate_q_proj"
    copies = [getattr(module, name, None) for name in (_KEYS, _VALUES)]
    is_scaled = any(isinstance(getattr(module, name, None), Tensor) for name in _SCALES)
    if is_scaled or not all(copy is not None and copy.dtype in (torch.bfloat16, torch.float16) for copy in copies):
        return (
            "quantizes its absorbed copies again, or has made none",
            "Use CUDA GPUs and checkpoints with 128x128 blocks",
        )
    return None
