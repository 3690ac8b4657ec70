"""Finds the names under which a loader takes weights together with their block scales.

A checkpoint that an engine can boot needs them: some loaders know scales only under a state dict's name, or under none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from fp8refit.live.names import without_numbers
from fp8refit.live.slots import FP8_DTYPE, SCALE_SUFFIX, TensorMeta
from fp8refit.live.tracing.boxes import Range, pieces_of
from fp8refit.live.tracing.records import Copy, Traced
from fp8refit.live.tracing.trace import Load, trace_loader

Ranges: TypeAlias = tuple[Range, ...]
Place: TypeAlias = tuple[str, Ranges, Ranges]
"""A parameter, the box of it that is written, and the box of a checkpoint tensor that is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleNames:
    """Asks a loader for the names of block scales.

    One tensor speaks for all whose names differ only in numbers.
    """

    load: Load
    named: Mapping[str, Tensor]
    """The model's parameters and buffers."""
    sources: Mapping[str, TensorMeta]
    """The checkpoint's tensors."""
    aliases: Mapping[str, str]
    """Other names, and the checkpoint's names for the same tensors."""
    block_size: tuple[int, int]

    def written_as(self, traced: Traced) -> dict[str, str]:
        """Return the names to write weights under if their own do not do; empty if none does.

        Stacks of matrices are always listed.

        Args:
            traced: What the loader did with `sources`.
        """
        copies = self._scaled(traced)
        kinds: dict[object, list[str]] = {}
        for name in copies:
            kinds.setdefault((without_numbers(name), self.sources[name].shape), []).append(name)
        spellings: dict[str, list[str]] = {name: [name] for name in copies}
        for alias, name in self.aliases.items():
            spellings.get(name, []).append(alias)
        taken = self._choose({names[0]: copies[names[0]] for names in kinds.values()}, spellings)
        found: dict[str, str] = {}
        for names in kinds.values():
            like = taken.get(names[0])
            for name in names:
                spelled = next((other for other in spellings[name] if without_numbers(other) == like), "")
                if spelled != name or len(self.sources[name].shape) > 2:
                    found[name] = spelled
        return found

    def _scaled(self, traced: Traced) -> dict[str, list[Copy]]:
        """Return the copies of each source that is only copied to parameters with block scales."""
        copies: dict[str, list[Copy]] = {}
        for copy in traced.copies:
            copies.setdefault(copy.source, []).append(copy)
        scaled = {name.removesuffix(SCALE_SUFFIX) for name in self.named if name.endswith(SCALE_SUFFIX)}
        return {name: each for name, each in copies.items() if name and {copy.parameter for copy in each} <= scaled}

    def _choose(self, samples: Mapping[str, list[Copy]], spellings: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Return for each sample the first spelling under which the loader takes weight and scales, without numbers.

        All samples go through one run of the loader, as some loaders wait for several tensors.
        """
        chosen: dict[str, str] = {}
        for turn in range(max((len(spellings[name]) for name in samples), default=0)):
            left = {name: spellings[name][turn] for name in samples if turn < len(spellings[name])}
            left = {name: spelled for name, spelled in left.items() if name not in chosen}
            given = {spelled: replace(self.sources[name], dtype=FP8_DTYPE) for name, spelled in left.items()}
            given |= {spelled + SCALE_SUFFIX: self._scale_of(self.sources[name]) for name, spelled in left.items()}
            copies: dict[str, list[Copy]] = {}
            for copy in trace_loader(self.load, self.named, given).copies if given else ():
                copies.setdefault(copy.source, []).append(copy)
            for name, spelled in left.items():
                weight, scale = copies.get(spelled, ()), copies.get(spelled + SCALE_SUFFIX, ())
                if {replace(copy, source=name) for copy in weight} == {*samples[name]} and self._fits(
                    name, weight, scale
                ):
                    chosen[name] = without_numbers(spelled)
        return chosen

    def _scale_of(self, weight: TensorMeta) -> TensorMeta:
        *stack, rows, columns = weight.shape
        blocks = (-(-size // block) for size, block in zip((rows, columns), self.block_size, strict=True))
        return TensorMeta(shape=(*stack, *blocks), dtype=torch.float32)

    def _fits(self, name: str, weight: Iterable[Copy], scale: Iterable[Copy]) -> bool:
        """Whether the loader puts the scale of every block where it puts the block."""
        meta = self.sources[name]
        blocks = self._places(weight, meta.shape)
        scales = self._places(scale, self._scale_of(meta).shape)
        if blocks is None or scales is None:
            return False
        return {(each[0] + SCALE_SUFFIX, *self._in_blocks(*each)) for each in blocks} == scales

    def _places(self, copies: Iterable[Copy], full_shape: Sequence[int]) -> set[Place] | None:
        """Return where boxes go and come from; None if some are in another order than the checkpoint's."""
        places: set[Place] = set()
        for copy in copies:
            pieces = pieces_of(copy, self.named[copy.parameter].shape, full_shape)
            if pieces is None or (self.block_size[0] != self.block_size[1] and any(p.is_transposed for p in pieces)):
                return None
            places |= {(copy.parameter, piece.into, piece.read) for piece in pieces}
        return places

    def _in_blocks(self, parameter: str, into: Ranges, read: Ranges) -> tuple[Ranges, Ranges] | tuple[None, None]:
        """Return the boxes of scales that belong to boxes of a weight; None if these cut blocks."""
        rows, num_blocks = self.named[parameter].shape[-2], self.named[parameter + SCALE_SUFFIX].shape[-2]
        *stack, (first, count), columns = into
        if num_blocks != -(-rows // self.block_size[0]) and first == rows // 2:
            first = num_blocks // 2 * self.block_size[0]  # halves of experts' matrices have blocks of their own
        found = [_blocks_of(ranges, self.block_size) for ranges in ((*stack, (first, count), columns), read)]
        return (found[0], found[1]) if found[0] and found[1] else (None, None)


def _blocks_of(ranges: Ranges, block_size: tuple[int, int]) -> Ranges | None:
    """Return the ranges of blocks in the last two dimensions; None if one begins inside a block."""
    *stack, rows, columns = ranges
    blocks = [
        (start / size, -(-count // size)) for (start, count), size in zip((rows, columns), block_size, strict=True)
    ]
    if any(not start.is_integer() for start, _ in blocks):
        return None
    return (*stack, *((int(start), count) for start, count in blocks))
