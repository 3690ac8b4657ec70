"""What an engine's own quantizer does, found by what it makes of a probe."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fp8refit.kernels import quantize_blockwise
from fp8refit.live.formats import BlockFormat


def format_of(probe: Tensor, codes: Tensor, scale: Tensor, formats: Iterable[BlockFormat]) -> BlockFormat | None:
    """Return the first of some formats in which a matrix becomes these codes and scales; None if it does in none.

    Args:
        probe: (N, K), of which every format makes other codes or scales.
        codes: (N, K) float8_e4m3fn, as the engine's quantizer gives them.
        scale: As it gives them, in the shape and the dtype of `quantize_blockwise`.
        formats: Those that may be it.
    """
    for each in formats:
        own_codes, own_scale = quantize_blockwise(probe, format=each)
        if torch.equal(own_scale, scale) and torch.equal(own_codes.view(torch.uint8), codes.view(torch.uint8)):
            return each
    return None
