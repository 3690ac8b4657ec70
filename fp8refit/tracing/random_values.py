"""Random values that a loader and a refit must treat alike, bit for bit. They are ranges of a few, to be made fast."""

import random
from math import prod

import torch
from torch import Tensor

from fp8refit.live.slots import FP8_DTYPE

_NUM_VALUES = (1 << 20) - 3
"""A prime number, so that rows of tensors begin with different values."""


class RandomValues:
    """Makes random tensors.

    Args:
        device: Where they are made.
    """

    def __init__(self, device: torch.device) -> None:
        self._random = random.Random(0)
        generator = torch.Generator(device).manual_seed(0)
        bits = torch.empty(_NUM_VALUES, dtype=torch.int16, device=device).random_(0, 1 << 15, generator=generator)
        codes = bits.to(torch.uint8)
        codes = torch.where(codes & 0x7F == 0x7F, 0x31, codes).view(FP8_DTYPE)
        exponents, signs = 0x3D00 + (bits & 0x380), (bits & 0x400) * -32
        half = ((bits & 0x7F) | exponents | signs).view(torch.bfloat16)
        self._values = {
            "noise": bits.to(torch.uint8),
            "codes": codes,
            "exact in FP8": codes.to(torch.bfloat16),
            "exact in FP16": half,
            # Every 16th lies out of the range of FP16.
            "any": torch.where(
                bits & 0x7800 == 0, half * 2**20, torch.where(bits & 0x7800 == 0x800, half / 2**20, half)
            ),
            "scales": (67 + bits.to(torch.int32) % 121 << 23).view(torch.float32),
        }

    def make(self, kind: str, shape: tuple[int, ...]) -> Tensor:
        """Return values: `noise` (bytes), finite E4M3 `codes`, powers of two as float32 `scales`; BF16 of `any` magnitude,
        `exact in FP16` or `exact in FP8`.
        """
        values, count = self._values[kind], prod(shape)
        first = self._random.randrange(_NUM_VALUES)
        parts = [values[first : first + count]]
        num_whole, rest = divmod(count - len(parts[0]), _NUM_VALUES)
        parts += [values] * num_whole + [values[:rest]]
        # Some devices cannot join FP8 tensors.
        return torch.cat([part.view(torch.uint8) for part in parts]).view(values.dtype).view(shape)

    def fill(self, tensor: Tensor) -> None:
        """Fill the storage of a tensor with noise."""
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        flat.copy_(self.make("noise", tuple(flat.shape)))
