"""What becomes of each tensor of a checkpoint that is quantized: by its name, or as an engine's layout says."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fp8refit.errors import CheckpointError
from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.live.names import is_not_a_weight
from fp8refit.live.slots import FP8_DTYPE, SCALE_SUFFIX, SOURCE_DTYPES, ScaleFormat, TensorMeta, dtype_name
from fp8refit.sources.checkpoints import SafetensorsSource

_LINEAR = re.compile(r"_proj(?:_with_mqa)?\.weight$|\.experts\..+\.weight$")
_STACK = re.compile(r"\.experts\.[a-z]\w*$")
_LM_HEAD = re.compile(r"(?:^|\.)lm_head\.weight$")
_FP32_SUFFIXES = ("e_score_correction_bias",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """What becomes of one source tensor."""

    name: str
    source: TensorMeta
    dtype: torch.dtype
    """dtype it is stored in."""
    scale_format: ScaleFormat | None
    """None if it is copied."""
    block_size: tuple[int, int]

    @property
    def num_source_bytes(self) -> int:
        """Bytes that are read."""
        return prod(self.source.shape) * self.source.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes that are written, scales included."""
        num_bytes = prod(self.source.shape) * self.dtype.itemsize
        if self.scale_format is not None:
            num_bytes += 4 * prod(-(-n // size) for n, size in zip(self.source.shape, self.block_size, strict=True))
        return num_bytes


def select(source: SafetensorsSource, config: Mapping[str, Any], *, kept: Collection[str]) -> dict[str, TensorMeta]:
    """Return the tensors to write, in the order of the source.

    Raises:
        CheckpointError: Names all that cannot be written, such as all experts of a layer in one tensor, if no engine
            keeps that tensor unquantized.
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
        if len(meta.shape) == 3 and _STACK.search(name) and name not in kept
    ]
    if problems:
        raise CheckpointError("this checkpoint cannot be quantized:", problems)
    is_tied = bool(config.get("tie_word_embeddings", False))
    return {name: meta for name, meta in source.metadata.items() if not (is_tied and _LM_HEAD.search(name))}


def output_by_name(name: str, meta: TensorMeta, scale_format: ScaleFormat, block_size: tuple[int, int]) -> Output:
    """Decide by name and shape: linear layers and experts are quantized."""
    if len(meta.shape) == 2 and _LINEAR.search(name):
        return Output(name=name, source=meta, dtype=FP8_DTYPE, scale_format=scale_format, block_size=block_size)
    is_rounded = meta.dtype is torch.float32 and not name.endswith(_FP32_SUFFIXES) and not is_not_a_weight(name)
    dtype = torch.bfloat16 if is_rounded else meta.dtype
    return Output(name=name, source=meta, dtype=dtype, scale_format=None, block_size=block_size)


def outputs_like(layout: EngineLayout, metadata: Mapping[str, TensorMeta]) -> list[Output]:
    """Decide what each tensor becomes for the engine that `layout` describes.

    Raises:
        CheckpointError: Names every tensor that does not fit.
    """
    if layout.refusals:
        raise CheckpointError("this layout belongs to an engine that cannot be refitted:", layout.refusals)
    slots = {slot.name: slot for slot in layout.slots}
    problems = [
        f"{slot.name}: slots of this engine need it in different formats"
        for slot in layout.slots
        if (slot.scale_format, slot.block_size) != (slots[slot.name].scale_format, slots[slot.name].block_size)
    ]
    outputs = []
    stacks = {stack.name: stack for stack in layout.stacked}
    for name, meta in metadata.items():
        slot = slots.get(layout.aliases.get(name, name))
        stack = stacks.get(layout.aliases.get(name, name))
        if stack is not None or (slot is not None and slot.is_rearranged):
            how = (
                "all experts of a layer in one tensor"
                if stack is not None
                else "it in an order that does not match its blocks"
            )
            problems.append(
                f"{name}: this model's checkpoints hold {how}; boot the engine from the BF16 checkpoint instead"
            )
        elif slot is not None and meta.shape != slot.full_shape:
            problems.append(f"{name}: has shape {list(meta.shape)}, but {list(slot.full_shape)} in this engine")
        elif slot is not None:
            outputs.append(_output_for_slot(name, meta, slot))
        elif is_not_a_weight(name):
            outputs.append(output_by_name(name, meta, ScaleFormat.FP32, (128, 128)))
        else:
            problems.append(f"{name}: this engine has no such weight")
    sent = {layout.aliases.get(name, name) for name in metadata}
    sent = sent.union(*(stack.parts for name, stack in stacks.items() if name in sent))
    problems += [f"{name}: is in this engine but not in the checkpoint" for name in slots if name not in sent]
    if problems:
        raise CheckpointError(f"this checkpoint does not fit the layout of {layout.engine}:", problems)
    return outputs


def _output_for_slot(name: str, meta: TensorMeta, slot: SlotLayout) -> Output:
    if slot.scale_format is not None and slot.block_size is not None:
        return Output(
            name=name, source=meta, dtype=FP8_DTYPE, scale_format=slot.scale_format, block_size=slot.block_size
        )
    # As in a refit, fp32 is converted straight to the engine's dtype, without rounding to BF16 first.
    dtype = getattr(torch, slot.dtype) if meta.dtype is torch.float32 else meta.dtype
    return Output(name=name, source=meta, dtype=dtype, scale_format=None, block_size=(128, 128))


def check_quantizable(outputs: Iterable[Output]) -> None:
    """Check that everything to be quantized can be.

    Raises:
        CheckpointError: Names every tensor that cannot.
    """
    problems = [
        f"{output.name}: is {dtype_name(output.source.dtype)} with shape {list(output.source.shape)}; only matrices of "
        "bfloat16, float16 or float32 can be quantized"
        for output in outputs
        if output.scale_format is not None
        and (output.source.dtype not in SOURCE_DTYPES or len(output.source.shape) != 2)
    ]
    if problems:
        raise CheckpointError("this checkpoint cannot be quantized:", problems)


def one_block_size(outputs: list[Output]) -> tuple[int, int]:
    """Return the checkpoint's block size; its config can name only one."""
    sizes = {output.block_size for output in outputs if output.scale_format is not None}
    if len(sizes) > 1:
        raise CheckpointError(
            f"this engine has several block sizes, but a checkpoint can have only one: {sorted(sizes)}"
        )
    return sizes.pop() if sizes else (128, 128)


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
