"""Decides what becomes of each tensor when a checkpoint is quantized: by its name, or by an engine's layout."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from fp8refit.errors import CheckpointError
from fp8refit.fill.plan import are_unneeded
from fp8refit.fill.ties import untied
from fp8refit.live.drafts import DRAFT
from fp8refit.live.formats import BlockFormat, Container, Placement, quantization_config
from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.live.names import is_not_a_weight
from fp8refit.live.slots import (
    FP8_DTYPE,
    SCALE_SUFFIX,
    SOURCE_DTYPES,
    Stacked,
    TensorMeta,
    dtype_name,
    stored_as,
)
from fp8refit.sources.checkpoints import SafetensorsSource

_LINEAR = re.compile(r"(?<!\beh)_proj(?:_with_mqa)?\.weight$|\.experts\..+\.weight$")
"""Of layers that published checkpoints quantize. They leave `eh_proj` of layers that draft tokens, which most engines hold as
`nn.Linear`.
"""
_STACK = re.compile(r"\.experts\.[a-z]\w*$")
_LM_HEAD = re.compile(r"(?:^|\.)lm_head\.weight$")
EMBEDDING = re.compile(r"(?:^|\.)(?:embed\w*|\w*embeddings?|wte|wpe)\.weight$")
_BOOT_BF16 = "boot the engine from the BF16 checkpoint instead"
_FP32_SUFFIXES = ("e_score_correction_bias",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """What becomes of one source tensor."""

    name: str
    source: TensorMeta
    dtype: torch.dtype
    """dtype it is stored in."""
    format: BlockFormat | None
    """None if it is copied."""
    written: tuple[str, ...]
    """Names it is stored under; see `Inventory.written_as`."""
    shared_with: str = ""
    """The first of the tensors that share its scale; empty if the scale is its own."""
    container: Container = Container.FP8
    """Where it is stored."""

    @property
    def num_source_bytes(self) -> int:
        """Bytes that are read."""
        return self.source.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that are written, scales included."""
        num_bytes = prod(self.source.shape) * self.dtype.itemsize
        if self.format is not None:
            num_bytes //= self.format.codes.per_element
            for _, _, shape in stored_as(self.written, self.source.shape):
                num_bytes += self.format.scale_format.dtype.itemsize * prod(self.format.scale_shape(shape))
                num_bytes += 4 * self.format.scale_format.has_two_levels
        return num_bytes

    @property
    def names(self) -> Iterator[str]:
        """Names of the tensors that are written, scales included."""
        for name, *_ in stored_as(self.written, self.source.shape):
            yield name
            if self.format is not None:
                yield name + self.container.scale_suffix(self.format)
                if self.format.scale_format.has_two_levels:
                    yield name + self.container.global_suffix


def select(source: SafetensorsSource, config: Mapping[str, Any], *, takes_stacks: bool) -> dict[str, TensorMeta]:
    """Return the tensors to write, in the order of the source.

    Raises:
        CheckpointError: Names all that cannot be written, such as all experts of a layer in one tensor, unless
            `takes_stacks`.
    """
    problems = list(source.problems)
    problems += [
        f"{name}: is FP8 already; pass the BF16 checkpoint it came from"
        for name, meta in source.metadata.items()
        if meta.dtype == FP8_DTYPE or name.endswith(SCALE_SUFFIX)
    ]
    problems += [
        f"{name}: holds all experts of a layer in one tensor, as state dicts do, but engines boot block FP8 from one tensor "
        "per expert; write the model with save_pretrained()"
        for name, meta in source.metadata.items()
        if not takes_stacks and len(meta.shape) == 3 and _STACK.search(name)
    ]
    if problems:
        raise CheckpointError("this checkpoint cannot be quantized:", problems)
    is_tied = bool(config.get("tie_word_embeddings", False))
    return {name: meta for name, meta in source.metadata.items() if not (is_tied and _LM_HEAD.search(name))}


def check_ties(source: SafetensorsSource, config: Mapping[str, Any], like: EngineLayout | None) -> None:
    """Check that tensors which an engine holds as one are equal.

    Raises:
        CheckpointError: The LM head, or another tied tensor, differs.
    """
    metadata, firsts = source.metadata, dict(like.aliases) if like is not None else {}
    if config.get("tie_word_embeddings", False):
        heads, embeddings = (list(filter(regex.search, metadata)) for regex in (_LM_HEAD, EMBEDDING))
        firsts |= {head: name for head in heads for name in embeddings if metadata[name].shape == metadata[head].shape}
    ties = {name: (first, torch.bfloat16) for name, first in firsts.items() if {name, first} <= metadata.keys()}
    if problems := untied(ties, source):
        raise CheckpointError("this checkpoint cannot be quantized:", problems)


def output_by_name(name: str, meta: TensorMeta, block_format: BlockFormat) -> Output:
    """Decide by name and shape: linear layers and experts are quantized."""
    if len(meta.shape) == 2 and _LINEAR.search(name):
        return Output(name=name, source=meta, dtype=block_format.codes.dtype, format=block_format, written=(name,))
    is_rounded = meta.dtype is torch.float32 and not name.endswith(_FP32_SUFFIXES) and not is_not_a_weight(name)
    return _copied(name, meta, torch.bfloat16 if is_rounded else meta.dtype)


def outputs_like(layout: EngineLayout, metadata: Mapping[str, TensorMeta]) -> list[Output]:
    """Decide what each tensor becomes for the engine that `layout` describes.

    Raises:
        CheckpointError: Names every tensor that does not fit.
    """
    if layout.refusals:
        raise CheckpointError("this layout belongs to an engine that cannot be refitted:", layout.refusals)
    layout = _without_draft(layout)
    slots = {slot.name: slot for slot in layout.slots}
    if any(slot.scale_format is not None and slot.scale_format.has_exponents for slot in layout.slots):
        raise CheckpointError(f"no checkpoint is written for MXFP8, which {layout.engine} makes of BF16 itself at boot")
    if cut := [slot.name for slot in layout.slots if _is_cut(slot)]:
        others = f" and {len(cut) - 1} others" if len(cut) > 1 else ""
        raise CheckpointError(
            f"each rank of this engine has a scale of its own for its part of {cut[0]}{others}, where a checkpoint has one for "
            f"all; {_BOOT_BF16}"
        )
    problems = [
        f"{slot.name}: slots of this engine need it in different formats"
        for slot in layout.slots
        if (slot.format, slot.shared_with) != (slots[slot.name].format, slots[slot.name].shared_with)
    ]
    stacks = {stack.name: stack for stack in layout.stacked}
    outputs, is_unneeded = [], are_unneeded(layout.unneeded)
    for name, meta in metadata.items():
        verdict = _judge(layout, name, meta, slots, stacks, is_unneeded)
        if isinstance(verdict, str):
            problems.append(f"{name}: {verdict}")
        else:
            outputs.append(verdict)
    sent = {layout.aliases.get(name, name) for name in metadata}
    sent = sent.union(*(stack.parts for name, stack in stacks.items() if name in sent))
    problems += [f"{name}: is in this engine but not in the checkpoint" for name in slots if name not in sent]
    if problems:
        raise CheckpointError(f"this checkpoint does not fit the layout of {layout.engine}:", problems)
    return outputs


def _without_draft(layout: EngineLayout) -> EngineLayout:
    """The same without a draft that has a checkpoint of its own."""
    return layout.model_copy(
        update={
            "slots": tuple(slot for slot in layout.slots if not slot.name.startswith(DRAFT)),
            "stacked": tuple(stack for stack in layout.stacked if not stack.name.startswith(DRAFT)),
        }
    )


def _is_cut(slot: SlotLayout) -> bool:
    """Whether a row, or the weight, has a scale for each rank's part of it."""
    held, start, shape, full = slot.format, slot.offset, slot.shape, slot.full_shape
    return held is not None and (held.has_rows or held.is_shared) and not held.holds_whole_blocks(start, shape, full)


def _judge(
    layout: EngineLayout,
    name: str,
    meta: TensorMeta,
    slots: Mapping[str, SlotLayout],
    stacks: Mapping[str, Stacked],
    is_unneeded: Callable[[str], bool],
) -> Output | str:
    """What becomes of a tensor, or why nothing does."""
    canonical = layout.aliases.get(name, name)
    slot, stack = slots.get(canonical), stacks.get(canonical)
    written = layout.written_as.get(canonical, (name,))
    if stack is not None:
        if canonical not in layout.written_as:
            return f"this model's checkpoints hold all experts of a layer in one tensor; {_BOOT_BF16}"
        slot = slots[next(iter(stack.parts))]
    if slot is None:
        return _copied(name, meta, meta.dtype) if is_unneeded(name) else "this engine has no such weight"
    if slot.format is not None and slot.format.needs_maximum and not slot.shared_with:
        return "an earlier version wrote this layout, without what shares its scale; inspect the engine again"
    if slot.is_rearranged:
        return f"this model's checkpoints hold it in an order that does not match its blocks; {_BOOT_BF16}"
    if not written:
        return f"this engine's own loader takes its block scales under no name; {_BOOT_BF16}"
    shape = slot.full_shape if stack is None else stack.shape_in_checkpoint
    if meta.shape != shape:
        return f"has shape {list(meta.shape)}, but {list(shape)} in this engine"
    return _output_for_slot(name, meta, slot, written)


def _output_for_slot(name: str, meta: TensorMeta, slot: SlotLayout, written: tuple[str, ...]) -> Output:
    if slot.format is not None:
        return Output(
            name=name,
            source=meta,
            dtype=slot.format.codes.dtype,
            format=replace(slot.format, placement=Placement.ROW_MAJOR),  # which the kernel changes at boot
            written=written,
            shared_with=slot.shared_with,
        )
    # As in a refit, fp32 is converted straight to the engine's dtype, without rounding to BF16 first.
    return _copied(name, meta, getattr(torch, slot.dtype) if meta.dtype is torch.float32 else meta.dtype)


def _copied(name: str, meta: TensorMeta, dtype: torch.dtype) -> Output:
    return Output(name=name, source=meta, dtype=dtype, format=None, written=(name,))


def check_quantizable(outputs: Iterable[Output]) -> None:
    """Check that everything to be quantized can be.

    Raises:
        CheckpointError: Names every tensor that cannot.
    """
    problems = [
        f"{output.name}: is {dtype_name(output.source.dtype)} with shape {list(output.source.shape)}; only matrices of "
        "bfloat16, float16 or float32 can be quantized"
        for output in outputs
        if output.format is not None
        and (output.source.dtype not in SOURCE_DTYPES or len(output.source.shape) not in (2, 3))
    ]
    if problems:
        raise CheckpointError("this checkpoint cannot be quantized:", problems)


def quantization_of(outputs: list[Output]) -> dict[str, object]:
    """Return the checkpoint's quantization config; it can name only one block size.

    Raises:
        CheckpointError: There are several.
    """
    formats = {(each.format.codes, each.format.block_size): each.format for each in outputs if each.format is not None}
    if len(formats) > 1:
        held = " and ".join(sorted(map(str, formats.values())))
        raise CheckpointError(
            f"this engine has {held}, but a checkpoint can have only one kind; boot it from BF16 weights, and refit it"
        )
    kept = ["lm_head"] + [
        output.name.removesuffix(".weight")
        for output in outputs
        if output.format is None
        and output.name.endswith(".weight")
        and len(output.source.shape) == 2
        and not EMBEDDING.search(output.name)
    ]
    container = outputs[0].container if outputs else Container.FP8
    quantized = [output.name.removesuffix(".weight") for output in outputs if output.format is not None]
    return quantization_config(next(iter(formats.values()), None), kept, container, quantized)


def plan_shards(outputs: list[Output], max_shard_bytes: int) -> dict[str, list[Output]]:
    """Map file names to tensors, in order. Scales are next to their codes."""
    shards: list[list[Output]] = []
    num_bytes = 0
    for output in outputs:
        if not shards or num_bytes + output.num_bytes > max_shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(output)
        num_bytes += output.num_bytes
    count = len(shards)
    return {f"model-{index:05}-of-{count:05}.safetensors": shard for index, shard in enumerate(shards, start=1)}
