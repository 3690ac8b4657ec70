"""Products of two low-rank matrices that are added to weights, and how the kernels take them.

Kernels read addresses from memory, so Triton cannot know their alignment and would load one element at a time. `kind_of`
says which layout a kernel is compiled for, and is None for products that only `add_product` takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))
ALIGNED = 16
"""The widest loads and stores need addresses that are multiples of this in bytes, and row lengths in elements."""
_LEAST_RANK, _MOST_RANK_BYTES = 16, 128
"""One step along the rank: the fewest elements that `tl.dot` takes, and the most bytes that do not spill registers."""

PRODUCT_FIELDS = ("up", "down", "up_row", "down_row", "rank", "scale")
NUM_PRODUCT_FIELDS = len(PRODUCT_FIELDS)
UP, DOWN, UP_ROW, SCALE = map(PRODUCT_FIELDS.index, ("up", "down", "up_row", "scale"))


@dataclass(slots=True, eq=False)
class LowRank:
    """`scale * up @ down`, to be added to a weight (N, K).

    Not frozen: a frozen dataclass takes the host three times as long to make.
    """

    up: Tensor
    """(N, R), any floating dtype."""
    down: Tensor
    """(R, K), likewise."""
    scale: float


class ProductKind(NamedTuple):
    """What the products of one launch have in common: constants that its kernel is compiled for."""

    low_dtype: torch.dtype
    """dtype of the two matrices."""
    step: int
    """How much of the rank a kernel takes at once."""
    is_one_step: bool
    is_rank_aligned: bool
    """Whether rows of `up` can be read with the widest loads."""


def fits(weight: Tensor, up: Tensor, down: Tensor) -> bool:
    """Whether `up @ down` has the shape of `weight`."""
    return weight.ndim == up.ndim == down.ndim == 2 and (*up.shape, down.shape[1]) == (
        weight.shape[0],
        down.shape[0],
        weight.shape[1],
    )


def kind_of(weight: Tensor, up: Tensor, down: Tensor) -> ProductKind | None:
    """The kind of a product that is added to `weight`.

    None if a tensor has an unsupported dtype, another device or no dense rows, or if `weight` or `down` is not aligned.
    """
    dtype, low_dtype, device = weight.dtype, up.dtype, weight.device
    if dtype not in _DTYPES or low_dtype not in _DTYPES or down.dtype is not low_dtype:
        return None
    if up.device != device or down.device != device or not fits(weight, up, down):
        return None
    (weight_row, weight_col), (up_row, up_col), (down_row, down_col) = weight.stride(), up.stride(), down.stride()
    if not weight_col == up_col == down_col == 1:
        return None
    if (weight.shape[1] | weight_row | down_row | weight.data_ptr() | down.data_ptr()) % ALIGNED:
        return None
    rank = up.shape[1]
    step = step_of(rank, low_dtype)
    return ProductKind(low_dtype, step, rank <= step, not (rank | up_row | up.data_ptr()) % ALIGNED)


def step_of(rank: int, dtype: torch.dtype) -> int:
    """How much of a rank kernels take at once: a power of two."""
    return min(max(1 << (rank - 1).bit_length(), _LEAST_RANK), _MOST_RANK_BYTES // dtype.itemsize)


def fields_of(products: Sequence[LowRank | None]) -> np.ndarray:
    """Return one row of a table per product, (products, fields) int64; zeros for None."""
    fields = np.zeros((len(products), NUM_PRODUCT_FIELDS), dtype=np.int64)
    there = [number for number, each in enumerate(products) if each is not None]
    held = [each for each in products if each is not None]
    if held:
        fields[there, :SCALE] = [
            (each.up.data_ptr(), each.down.data_ptr(), each.up.stride(0), each.down.stride(0), each.up.shape[1])
            for each in held
        ]
        fields[there, SCALE] = np.array([each.scale for each in held], dtype=np.float32).view(np.int32)
    return fields


def of_boxes(fields: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return rows for products that are added to boxes of weights.

    Args:
        fields: The rows for the whole weights, (boxes, fields).
        starts: First row and first column of each box in its weight, each times the bytes of an element of `up` and `down`.
    """
    shifted = fields.copy()
    shifted[:, UP] += starts[:, 0] * fields[:, UP_ROW]
    shifted[:, DOWN] += starts[:, 1]
    return shifted
