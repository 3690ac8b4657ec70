"""Compares tensors that a source has under two names, where an engine holds one tensor for both."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fp8refit.kernels.reference_table import bytes_of
from fp8refit.live.slots import FP8_DTYPE
from fp8refit.sources.source import RandomAccess

_CHUNK_BYTES = 64 << 20


def untied(ties: Mapping[str, tuple[str, torch.dtype]], source: RandomAccess) -> list[str]:
    """Return one line for each tensor that differs from the one it is tied to. Reads both, unless they share their memory.

    Args:
        ties: See `RefitPlan.ties`.
        source: Has both of each.
    """
    problems = []
    for name, (first, dtype) in ties.items():
        found = source.pick((first, name))
        if differ(found[first], found[name], dtype):
            problems.append(tie_problem(name))
    return problems


def differ(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether any bit differs once both are rounded to a dtype. Codes are not rounded, and equal nothing but codes."""
    if one.shape != other.shape or (one.dtype is FP8_DTYPE) != (other.dtype is FP8_DTYPE):
        return True
    if (one.data_ptr(), one.stride(), one.dtype) == (other.data_ptr(), other.stride(), other.dtype) and one.numel():
        return False
    dtype = FP8_DTYPE if one.dtype is FP8_DTYPE else dtype
    rows = [each.detach().reshape(each.shape or (1,)) for each in (one, other)]
    num_rows = max(1, _CHUNK_BYTES // max(1, rows[0][:1].nbytes))
    pairs = zip(*(torch.split(each, num_rows) for each in rows), strict=True)
    return any(not torch.equal(bytes_of(a.to(dtype)), bytes_of(b.to(a.device, dtype))) for a, b in pairs)


def tie_problem(name: str) -> str:
    """Say that a tensor differs from the one it is tied to."""
    return (
        f"{name}: is tied, and differs from what came under its other name; send one of them, or untie the engine "
        "(tie_word_embeddings=false in its config)"
    )
