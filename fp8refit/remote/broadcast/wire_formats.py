"""In which form each tensor of a policy travels to the ranks that read it: pure, on names, shapes, dtypes and layouts alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fp8refit.config import RefitConfig
from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.live.names import is_not_a_weight
from fp8refit.live.slots import FP8_DTYPE, SCALE_SUFFIX, SOURCE_DTYPES, ScaleFormat, Stacked, TensorMeta, dtype_name
from fp8refit.remote.broadcast.sections import Sections
from fp8refit.sources.row_runs import BLOCK_ROWS
from fp8refit.transport.collective.buckets import WireTensor
from fp8refit.transport.memory.segment import DTYPES


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where the trainer has what travels: a tensor of its own, or rows of one matrix of a stack."""

    name: str
    """Checkpoint name of the trainer's tensor."""
    meta: TensorMeta
    """Of the trainer's tensor."""
    expert: int | None = None
    """Which matrix of a stack."""
    first_row: int = 0
    """Of what travels, in that matrix."""
    is_transposed: bool = False
    """Whether rows and columns of the matrix change places first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """What travels."""

    tensors: tuple[WireTensor, ...]
    origins: tuple[Origin, ...]
    """Of each tensor, in the order in which the trainer's are announced and, of a stack, of its experts and rows."""


def choose_wire(
    metadata: Mapping[str, TensorMeta],
    layouts: Sequence[EngineLayout],
    config: RefitConfig,
    sections: Sections | None = None,
) -> Wire:
    """Choose a form for everything that is announced, in its order.

    A weight is quantized before it travels if every rank that holds a part of it wants the same blocks and scales, and no
    part cuts through a block: each rank would have computed just these bytes. All else travels in the narrower of the dtypes
    in which it is held there and here. A stack of experts travels as the tensors that a checkpoint has of each expert.

    Args:
        metadata: What the trainer has, by checkpoint name.
        layouts: Of every rank of every engine.
        config: How to refit.
        sections: Which ranks get only a part of some tensors.
    """
    chooser = _Chooser(metadata, layouts, config, sections if sections is not None else Sections())
    chosen = [each for name, meta in metadata.items() for each in chooser.choose(name, meta)]
    return Wire(tensors=tuple(tensor for tensor, _ in chosen), origins=tuple(origin for _, origin in chosen))


class _Chooser:
    """Knows what the ranks hold."""

    def __init__(
        self,
        metadata: Mapping[str, TensorMeta],
        layouts: Sequence[EngineLayout],
        config: RefitConfig,
        sections: Sections,
    ) -> None:
        self._metadata, self._config, self._sections = metadata, config, sections
        self._slots: dict[str, list[SlotLayout]] = {}
        self._aliases: dict[str, str] = {}
        self._stacks: dict[str, list[Stacked]] = {}
        for layout in layouts:
            self._aliases |= layout.aliases
            for slot in layout.slots:
                self._slots.setdefault(slot.name, []).append(slot)
            for stack in layout.stacked:
                self._stacks.setdefault(stack.name, []).append(stack)

    def choose(self, name: str, meta: TensorMeta) -> Iterator[tuple[WireTensor, Origin]]:
        """The forms of one of the trainer's tensors: one, or those of the matrices of a stack."""
        weight_name = name.removesuffix(SCALE_SUFFIX)
        canonical = self._aliases.get(weight_name, weight_name)
        is_superseded = canonical != weight_name and canonical in self._metadata
        travels = not is_superseded and not is_not_a_weight(name)
        is_transposed, parts = self._parts_of(canonical, meta)
        if not travels or not parts or name != weight_name:
            tensor = self._choose(name, meta, canonical)
            yield tensor.model_copy(update={"travels": travels}), Origin(name=name, meta=meta)
            return
        for (expert, first_row), part in sorted(parts.items()):
            matrix = TensorMeta(shape=self._slots[part][0].full_shape, dtype=meta.dtype)
            origin = Origin(name=name, meta=meta, expert=expert, first_row=first_row, is_transposed=is_transposed)
            yield self._choose(part, matrix, part).model_copy(update={"part_of": name}), origin

    def _parts_of(self, name: str, meta: TensorMeta) -> tuple[bool, dict[tuple[int, int], str]]:
        """Whether a stack is transposed, and the checkpoint's name of each matrix in it that an engine holds.

        No names if it has to be judged as it is: it does not fit, or the same comes expert by expert too.
        """
        stacks = self._stacks.get(name, ())
        ways = {stack.is_transposed_in(meta.shape) for stack in stacks}
        named = {(place, part) for stack in stacks for part, place in stack.parts.items()}
        parts = dict(named)
        is_sent = any(part in self._metadata for part in parts.values())
        if meta.dtype not in SOURCE_DTYPES or len(ways) != 1 or len(parts) < len(named) or is_sent:
            return False, {}
        is_transposed = ways.pop()
        return (False, {}) if is_transposed is None else (is_transposed, parts)

    def _choose(self, name: str, meta: TensorMeta, canonical: str) -> WireTensor:
        """The form of a tensor of the checkpoint."""
        if name.endswith(SCALE_SUFFIX):
            dtype = torch.float32 if meta.dtype in SOURCE_DTYPES else meta.dtype
            return WireTensor(name=name, shape=meta.shape, dtype=dtype_name(dtype))
        held = self._slots.get(canonical, [])
        fits = all(slot.full_shape == meta.shape for slot in held)
        cut = self._sections.cuts.get(canonical) if fits else None
        blocks = self._blocks_of(name, meta, held) if fits else None
        if blocks is None:
            dtype = _narrower(meta.dtype, held, self._config)
            return WireTensor(name=name, shape=meta.shape, dtype=dtype_name(dtype), row_step=_row_step(held), cut=cut)
        block_size, scale_format = blocks
        return WireTensor(
            name=name,
            shape=meta.shape,
            dtype=dtype_name(FP8_DTYPE),
            block_size=block_size,
            scale_format=scale_format,
            row_step=block_size[0],
            cut=cut,
        )

    def _blocks_of(
        self, name: str, meta: TensorMeta, held: Sequence[SlotLayout]
    ) -> tuple[tuple[int, int], ScaleFormat] | None:
        """The blocks and scales in which a tensor is quantized before it travels; None if it is not."""
        formats = {(slot.block_size, slot.scale_format) for slot in held}
        is_asked = self._config.collective.wire == "fp8" and name + SCALE_SUFFIX not in self._metadata
        if not is_asked or meta.dtype not in SOURCE_DTYPES or len(formats) != 1:
            return None
        ((block_size, scale_format),) = formats
        if block_size is None or scale_format is None or BLOCK_ROWS % block_size[0]:
            return None  # or runs of rows would cut blocks
        return (block_size, scale_format) if all(_is_on_grid(slot, block_size) for slot in held) else None


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


def _narrower(dtype: torch.dtype, held: Sequence[SlotLayout], config: RefitConfig) -> torch.dtype:
    """The dtype to which every slot rounds a tensor, if it is one and narrower than the trainer's."""
    before_blocks = "bfloat16" if config.fp32_sources == "round_to_bf16" else dtype_name(dtype)
    wanted = {slot.dtype if slot.block_size is None else before_blocks for slot in held}
    if len(wanted) != 1 or dtype not in SOURCE_DTYPES:
        return dtype
    found = DTYPES.get(wanted.pop())
    return found if found in SOURCE_DTYPES and found.itemsize < dtype.itemsize else dtype
