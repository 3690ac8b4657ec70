"""In which form each tensor of a policy travels to the ranks that read it: pure, on names, shapes, dtypes and layouts alone."""

from collections.abc import Mapping, Sequence

import torch

from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError
from fp8refit.layout import EngineLayout, SlotLayout
from fp8refit.names import is_not_a_weight
from fp8refit.slots import FP8_DTYPE, SCALE_SUFFIX, SOURCE_DTYPES, ScaleFormat, TensorMeta, dtype_name
from fp8refit.transport.buckets import WireTensor
from fp8refit.transport.segment import DTYPES


def choose_wire(
    metadata: Mapping[str, TensorMeta], layouts: Sequence[EngineLayout], config: RefitConfig
) -> tuple[WireTensor, ...]:
    """Choose a form for everything that is announced, in its order.

    A weight is quantized before it travels if every rank that holds a part of it wants the same blocks and scales, and no
    part cuts through a block: each rank would have computed just these bytes. All else travels in the narrower of the dtypes
    in which it is held there and here.

    Args:
        metadata: What the trainer has, by checkpoint name.
        layouts: Of every rank of every engine.
        config: How to refit.

    Raises:
        InvalidSourceError: A dtype that no weight has.
    """
    slots: dict[str, list[SlotLayout]] = {}
    aliases: dict[str, str] = {}
    for layout in layouts:
        aliases |= layout.aliases
        for slot in layout.slots:
            slots.setdefault(slot.name, []).append(slot)
    odd = [
        f"{name}: has dtype {dtype_name(meta.dtype)}, which no weight has"
        for name, meta in metadata.items()
        if dtype_name(meta.dtype) not in DTYPES
    ]
    if odd:
        raise InvalidSourceError(odd)
    chosen = []
    for name, meta in metadata.items():
        weight_name = name.removesuffix(SCALE_SUFFIX)
        canonical = aliases.get(weight_name, weight_name)
        is_superseded = canonical != weight_name and canonical in metadata
        travels = not is_superseded and not is_not_a_weight(name)
        held = slots.get(canonical, [])
        chosen.append(_choose(name, meta, held, config).model_copy(update={"travels": travels}))
    return tuple(chosen)


def _choose(name: str, meta: TensorMeta, held: Sequence[SlotLayout], config: RefitConfig) -> WireTensor:
    if name.endswith(SCALE_SUFFIX):
        return WireTensor(
            name=name, shape=meta.shape, dtype="float32" if meta.dtype in SOURCE_DTYPES else dtype_name(meta.dtype)
        )
    formats = {(slot.block_size, slot.scale_format) for slot in held}
    if meta.dtype in SOURCE_DTYPES and len(formats) == 1:
        ((block_size, scale_format),) = formats
        if block_size is not None and scale_format is not None:
            return _choose_quantized(name, meta, held, block_size, scale_format, config)
    return WireTensor(
        name=name, shape=meta.shape, dtype=dtype_name(_narrower(meta.dtype, held)), row_step=_row_step(held)
    )


def _choose_quantized(
    name: str,
    meta: TensorMeta,
    held: Sequence[SlotLayout],
    block_size: tuple[int, int],
    scale_format: ScaleFormat,
    config: RefitConfig,
) -> WireTensor:
    """The form of a tensor that every rank which holds it holds as the same kind of blocks."""
    fits = all(slot.full_shape == meta.shape and _is_on_grid(slot, block_size) for slot in held)
    if config.collective.wire == "fp8" and fits:
        return WireTensor(
            name=name,
            shape=meta.shape,
            dtype=dtype_name(FP8_DTYPE),
            block_size=block_size,
            scale_format=scale_format,
            row_step=block_size[0],
        )
    is_rounded = meta.dtype is torch.float32 and config.fp32_sources == "round_to_bf16"
    dtype = torch.bfloat16 if is_rounded else meta.dtype
    return WireTensor(name=name, shape=meta.shape, dtype=dtype_name(dtype), row_step=_row_step(held))


def _is_on_grid(slot: SlotLayout, block_size: tuple[int, int]) -> bool:
    """Whether a slice begins at a block, and ends with one or with its tensor."""
    ends = (start + n for start, n in zip(slot.offset, slot.shape, strict=True))
    return not any(start % size for start, size in zip(slot.offset, block_size, strict=True)) and all(
        end % size == 0 or end == full for end, size, full in zip(ends, block_size, slot.full_shape, strict=True)
    )


def _row_step(held: Sequence[SlotLayout]) -> int:
    """At multiples of how many rows a tensor may be cut that travels unquantized: where no rank's blocks are cut."""
    steps = {slot.block_size[0] for slot in held if slot.block_size is not None}
    if not steps:
        return 1
    if len(steps) > 1 or any(slot.offset[0] % min(steps) for slot in held):
        return 0
    return steps.pop()


def _narrower(dtype: torch.dtype, held: Sequence[SlotLayout]) -> torch.dtype:
    """The dtype in which the slots hold a tensor, if it is one and no wider than the trainer's."""
    wanted = {slot.dtype for slot in held}
    if len(wanted) != 1 or dtype not in SOURCE_DTYPES:
        return dtype
    found = DTYPES.get(wanted.pop())
    return found if found in SOURCE_DTYPES and found.itemsize < dtype.itemsize else dtype
