"""The codes and scales of weights that FSDP2 shards: each rank quantizes its own rows, with blocks shared by ranks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional

from fp8refit.kernels.reference import E4M3_MAX, block_scales

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from fp8refit.training.precision.weights import TrainedWeight


def has_fsdp(model: nn.Module) -> bool:
    """Whether FSDP2 shards any part of a model."""
    return any(hasattr(type(module), "unshard") for module in model.modules())


def quantize_shards(weights: "Sequence[TrainedWeight]") -> "tuple[list[TrainedWeight], list[TrainedWeight]]":
    """Quantize this rank's rows of each weight. Return those with NaN or Inf on any rank, and those changed on any.

    Two collective operations, with one number per block and two per weight. Peak memory: a few fp32 copies of one shard.
    """
    grids = [_own_maxima(weight) for weight in weights]
    _take_largest(weights, grids)
    flags = []
    for weight, amax in zip(weights, grids, strict=True):
        is_bad, is_changed = ~torch.isfinite(amax).all(), _encode_own_rows(weight, amax)
        flags.append(torch.stack([is_bad, is_changed]).int())
    _take_largest(weights, flags)
    bad, changed = torch.stack(flags, 1).tolist()
    marked = [weight for weight, is_changed in zip(weights, changed, strict=True) if is_changed]
    for weight in marked:
        weight.gathers.reshard()  # what is gathered at the moment is old
    return [weight for weight, is_bad in zip(weights, bad, strict=True) if is_bad], marked


def _take_largest(weights: "Sequence[TrainedWeight]", values: list[Tensor]) -> None:
    """Replace each value by the elementwise maximum over the ranks that share its weight."""
    for group, members in _by_group(weights).items():
        flat = torch.cat([values[index].flatten() for index in members])
        torch.distributed.all_reduce(flat, op=torch.distributed.ReduceOp.MAX, group=group)
        for index, part in zip(members, torch.split(flat, [values[index].numel() for index in members]), strict=True):
            values[index] = part.view_as(values[index])


def _by_group(weights: "Sequence[TrainedWeight]") -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for index, weight in enumerate(weights):
        assert weight.sharded is not None, f"{weight.name=}"
        groups.setdefault(weight.sharded.device_mesh.get_group(shard_axis(weight.sharded)), []).append(index)
    return groups


def shard_axis(weight: "DTensor") -> int:
    """The mesh axis along which FSDP2 shards rows or experts.

    Raises:
        ValueError: Something other than FSDP2 sharded it.
    """
    axes = [axis for axis, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if (
        len(axes) != 1
        or not weight.placements[axes[0]].is_shard(0)
        or type(weight.placements[axes[0]]).__name__ != "Shard"
    ):
        raise ValueError(
            f"is placed as {weight.placements}; shard it with fully_shard alone, along its first dimension"
        )
    return axes[0]


def _own_rows(weight: "TrainedWeight") -> tuple[Tensor, int, int]:
    """Return this rank's rows or experts as fp32 values rounded to BF16, the index of the first, and rows per rank."""
    sharded = weight.sharded
    assert sharded is not None, f"{weight.name=}"
    axis = shard_axis(sharded)
    chunk = -(-sharded.shape[0] // sharded.device_mesh.size(axis))
    first = min(chunk * sharded.device_mesh.get_local_rank(axis), sharded.shape[0])
    local = weight.local
    return (local.to(torch.bfloat16) if local.dtype is torch.float32 else local).float(), first, chunk


def _own_maxima(weight: "TrainedWeight") -> Tensor:
    """Return the largest magnitude of this rank's part of every block: 0 if it has no part, Inf for NaN."""
    rows, first, _ = _own_rows(weight)
    grid = rows.new_zeros(weight.format.scale_shape(weight.parameter.shape))
    if not rows.numel():
        return grid
    block_n, block_k = weight.format.block_size
    skipped = 0 if rows.ndim == 3 else first % block_n
    last = -(rows.shape[-2] + skipped) % block_n
    padded = functional.pad(rows.abs(), (0, -rows.shape[-1] % block_k, skipped, last))
    *stack, num_rows, num_cols = padded.shape
    blocks = padded.view(*stack, num_rows // block_n, block_n, num_cols // block_k, block_k)
    amax = blocks.amax(dim=(-3, -1))
    start = first if rows.ndim == 3 else first // block_n
    grid[start : start + len(amax)] = torch.where(torch.isfinite(amax), amax, torch.inf)
    return grid


def _encode_own_rows(weight: "TrainedWeight", amax: Tensor) -> Tensor:
    """Quantize like `fp8refit.kernels.reference.quantize_reference`, but use maxima of blocks shared with other
    ranks. Return whether codes or scales are others than before.
    """
    rows, first, chunk = _own_rows(weight)
    scale = block_scales(amax, weight.format)
    held = weight.make_room((chunk, *rows.shape[1:]), rows.device)[: len(rows)].view(torch.uint8)
    assert weight.scale is not None, f"{weight.name=}"
    is_changed = (weight.scale != scale).any()
    weight.scale.copy_(scale)
    block_n, block_k = weight.format.block_size
    inverse = torch.ones_like(scale) / scale
    if rows.ndim == 3:
        inverse, first = inverse[first : first + len(rows)], 0
    row_blocks = torch.arange(first, first + rows.shape[-2], device=rows.device) // block_n
    col_blocks = torch.arange(rows.shape[-1], device=rows.device) // block_k
    inverse = inverse.index_select(-2, row_blocks).index_select(-1, col_blocks)
    codes = (rows * inverse).clamp(-E4M3_MAX, E4M3_MAX).to(weight.format.codes.dtype).view(torch.uint8)
    is_changed |= (codes != held).any()
    held.copy_(codes)
    return is_changed
