"""Chooses the form in which each tensor of a policy is sent, from names, shapes, dtypes and layouts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fp8refit.config import RefitConfig
from fp8refit.fill.plan import are_unneeded
from fp8refit.live.formats import BlockFormat
from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.live.slots import SCALE_SUFFIX, SOURCE_DTYPES, Stacked, TensorMeta, dtype_name
from fp8refit.remote.broadcast.sections import Sections
from fp8refit.sources.row_runs import BLOCK_ROWS
from fp8refit.transport.collective.buckets import WireTensor
from fp8refit.transport.memory.segment import DTYPES


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where the trainer has a tensor that is sent: as a tensor, or as rows of one matrix of a stack."""

    name: str
    """Checkpoint name of the trainer's tensor."""
    meta: TensorMeta
    """Shape and dtype of the trainer's tensor."""
    expert: int | None = None
    """Index of the matrix in a stack."""
    first_row: int = 0
    """First row in that matrix."""
    is_transposed: bool = False
    """Whether to transpose the matrix first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """Everything that is sent."""

    tensors: tuple[WireTensor, ...]
    origins: tuple[Origin, ...]
    """Origin of each tensor, in the announced order; within a stack, by expert and row."""
    ties: Mapping[str, tuple[str, torch.dtype]] = field(default_factory=dict)
    """Tensors that are not sent because another name of theirs is; see `RefitPlan.ties`."""


def choose_wire(
    metadata: Mapping[str, TensorMeta],
    layouts: Sequence[EngineLayout],
    config: RefitConfig,
    sections: Sections | None = None,
    *,
    sends_both: bool = False,
) -> Wire:
    """Choose a form for everything announced, in order.

    The trainer quantizes a weight if every rank that holds a part of it uses the same blocks and scale format, and no
    part cuts through a block: then each rank would have computed the same bytes. Everything else is sent in the
    narrower of the trainer's and the engine's dtypes. A stack of experts is sent as one tensor per expert.

    Args:
        metadata: The trainer's tensors, by checkpoint name.
        layouts: The layouts of every rank of every engine.
        config: Options of the refit.
        sections: Which ranks get only parts of some tensors.
        sends_both: Whether to send tensors under all of their names, because the trainer cannot compare them.
    """
    chooser = _Chooser(metadata, layouts, config, sections if sections is not None else Sections(), sends_both)
    chosen = [each for name, meta in metadata.items() for each in chooser.choose(name, meta)]
    tensors, origins = tuple(tensor for tensor, _ in chosen), tuple(origin for _, origin in chosen)
    return Wire(tensors=tensors, origins=origins, ties=chooser.ties)


class _Chooser:
    """Chooses forms, from what the ranks hold."""

    def __init__(
        self,
        metadata: Mapping[str, TensorMeta],
        layouts: Sequence[EngineLayout],
        config: RefitConfig,
        sections: Sections,
        sends_both: bool,
    ) -> None:
        self.ties: dict[str, tuple[str, torch.dtype]] = {}
        self._firsts: dict[str, str] = {}
        self._sends_both = sends_both
        self._metadata, self._config, self._sections = metadata, config, sections
        self._slots: dict[str, list[SlotLayout]] = {}
        self._aliases: dict[str, str] = {}
        self._stacks: dict[str, list[Stacked]] = {}
        self._is_unneeded = are_unneeded([*config.ignore, *(name for layout in layouts for name in layout.unneeded)])
        for layout in layouts:
            self._aliases |= layout.aliases
            for slot in layout.slots:
                self._slots.setdefault(slot.name, []).append(slot)
            for stack in layout.stacked:
                self._stacks.setdefault(stack.name, []).append(stack)

    def choose(self, name: str, meta: TensorMeta) -> Iterator[tuple[WireTensor, Origin]]:
        """Yield the form of one of the trainer's tensors, or of each matrix of a stack."""
        weight_name = name.removesuffix(SCALE_SUFFIX)
        canonical = self._aliases.get(weight_name, weight_name)
        first = self._firsts.setdefault(canonical + name[len(weight_name) :], name)  # ranks take the first to come, too
        if first != name and canonical in self._slots and not self._sends_both:
            slot = self._slots[canonical][0]
            self.ties[name] = first, torch.bfloat16 if slot.format is not None else DTYPES[slot.dtype]
        is_held = canonical in self._slots or canonical in self._stacks
        travels = name not in self.ties and (is_held or not self._is_unneeded(name))
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
        """Whether a stack is transposed, and the checkpoint name of each of its matrices that an engine holds.

        No names if the stack cannot be split: it does not fit, or its experts are also sent one by one.
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
        """The form of one checkpoint tensor."""
        if name.endswith(SCALE_SUFFIX):
            dtype = torch.float32 if meta.dtype in SOURCE_DTYPES else meta.dtype
            return WireTensor(name=name, shape=meta.shape, dtype=dtype_name(dtype))
        held = self._slots.get(canonical, [])
        fits = all(slot.full_shape == meta.shape for slot in held)
        cut = self._sections.cuts.get(canonical) if fits else None
        block_format = self._format_of(name, meta, held) if fits else None
        if block_format is None:
            dtype = _narrower(meta.dtype, held, self._config)
            reaches_beyond = any(slot.format is not None and slot.format.amax_over.reaches_beyond for slot in held)
            is_shared = any(slot.format is not None and slot.format.needs_maximum for slot in held)
            if cut is not None and (is_shared or (cut.dim == 1 and reaches_beyond)):
                cut = None  # a rank needs more than what it holds, or keeps it whole for a while
            return WireTensor(name=name, shape=meta.shape, dtype=dtype_name(dtype), row_step=_row_step(held), cut=cut)
        return WireTensor(
            name=name,
            shape=meta.shape,
            dtype=dtype_name(block_format.codes.dtype),
            format=block_format,
            row_step=block_format.block_size[0],
            cut=cut,
        )

    def _format_of(self, name: str, meta: TensorMeta, held: Sequence[SlotLayout]) -> BlockFormat | None:
        """The format in which the trainer quantizes a tensor; None if it does not."""
        formats = {slot.format for slot in held}
        is_asked = self._config.collective.wire == "fp8" and name + SCALE_SUFFIX not in self._metadata
        if not is_asked or meta.dtype not in SOURCE_DTYPES or len(formats) != 1:
            return None
        (block_format,) = formats
        if block_format is None or BLOCK_ROWS % block_format.block_size[0]:
            return None  # otherwise runs of rows would cut blocks
        if block_format.is_tiled or block_format.scale_format.dtype is not torch.float32:
            return (
                None  # each rank puts its codes where its kernel looks for them, or needs maxima of all that is fused
            )
        is_whole = all(block_format.holds_whole_blocks(slot.offset, slot.shape, slot.full_shape) for slot in held)
        return block_format if is_whole else None


def _row_step(held: Sequence[SlotLayout]) -> int:
    """The row multiple at which an unquantized tensor may be cut without cutting any rank's blocks."""
    steps = {slot.format.row_step for slot in held if slot.format is not None}
    if not steps:
        return 1
    if len(steps) > 1 or any(slot.offset[0] % min(steps) for slot in held):
        return 0
    return steps.pop()


def _narrower(dtype: torch.dtype, held: Sequence[SlotLayout], config: RefitConfig) -> torch.dtype:
    """The dtype of all slots of a tensor, if they agree and it is narrower than the trainer's; else the trainer's."""
    before_blocks = "bfloat16" if config.fp32_sources == "round_to_bf16" else dtype_name(dtype)
    wanted = {slot.dtype if slot.format is None else before_blocks for slot in held}
    if len(wanted) != 1 or dtype not in SOURCE_DTYPES:
        return dtype
    found = DTYPES.get(wanted.pop())
    return found if found in SOURCE_DTYPES and found.itemsize < dtype.itemsize else dtype
