"""Finds the names under which a loader takes weights together with their block scales.

An engine can boot only from a checkpoint that uses them. Some loaders take scales only under a state dict's name, or only
expert by expert; some take none.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

from fp8refit.live.formats import BlockFormat, Container
from fp8refit.live.names import without_numbers
from fp8refit.live.slots import SCALE_SUFFIX, TensorMeta, stored_as
from fp8refit.tracing.boxes import Range, pieces_of
from fp8refit.tracing.records import Copy, Traced
from fp8refit.tracing.stored import matrices
from fp8refit.tracing.trace import Load, trace_loader, trace_once

Ranges: TypeAlias = tuple[Range, ...]
Spelling: TypeAlias = tuple[str, ...]
"""Names under which a weight with block scales is written; see `Inventory.written_as`."""
_STACK = re.compile(r"^(.+\.experts)\.([a-z]+(?:_[a-z]+)*)_proj$")
"""Experts and their fused projections, such as `gate_up_proj`."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A box of a matrix that is written, and the box of a checkpoint tensor that is read."""

    parameter: str
    into: Ranges
    read: Ranges
    is_transposed: bool

    def in_blocks(self, named: Mapping[str, Tensor], stored: BlockFormat) -> "_Place | None":
        """Return where the box's scales go and come from; None if it begins inside a block."""
        *stack, (first, count), columns = self.into
        rows, num_blocks = named[self.parameter].shape[-2], named[self.parameter + SCALE_SUFFIX].shape[-2]
        block_rows = stored.block_size[0]
        if num_blocks != -(-rows // block_rows) and first == rows // 2:
            first = num_blocks // 2 * block_rows  # halves of experts' matrices have blocks of their own
        into = _in_blocks((*stack, (first, count), columns), stored)
        read = _in_blocks(self.read, stored)
        if into is None or read is None:
            return None
        return _Place(self.parameter + SCALE_SUFFIX, into, read, self.is_transposed and _is_wide(read))

    def moved(self, start: Sequence[int]) -> "_Place":
        """Return the place with `read` counted in the whole tensor, where the stored part begins at `start`."""
        read = [(0, 1)] * (len(start) - len(self.read)) + list(self.read)
        moved = ((first + begin, count) for (first, count), begin in zip(read, start, strict=True))
        return replace(self, read=tuple(moved))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleNames:
    """Finds by trial under which names a loader takes block scales.

    Of all tensors whose names differ only in numbers, one is tried.
    """

    load: Load
    named: Mapping[str, Tensor]
    """The model's parameters and buffers."""
    sources: Mapping[str, TensorMeta]
    """The checkpoint's tensors."""
    aliases: Mapping[str, str]
    """Other names, and the checkpoint's names for the same tensors."""
    stored: BlockFormat
    """How checkpoints hold weights with block scales."""
    container: Container = Container.FP8
    """How they name and shape scales."""

    def written_as(self, traced: Traced) -> dict[str, Spelling]:
        """Return the names to write weights under if their own do not work; an empty tuple if no name works.

        Stacks are always listed.

        Args:
            traced: What the loader did with `sources`.
        """
        copies = self._scaled(traced)
        spellings = self._spellings(copies)
        kinds: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for name in copies:
            kinds.setdefault((without_numbers(name), self.sources[name].shape), []).append(name)
        chosen = self._choose({names[0]: copies[names[0]] for names in kinds.values()}, spellings)
        found: dict[str, Spelling] = {}
        for (_, shape), names in kinds.items():
            if chosen.get(names[0]) == (names[0],) and len(shape) <= 2:
                continue
            like = _without_numbers(chosen.get(names[0], ()))
            for name in names:
                spelling = next((each for each in spellings[name] if _without_numbers(each) == like), ())
                if spelling != (name,) or len(shape) > 2:
                    found[name] = spelling
        return found

    def _scaled(self, traced: Traced) -> dict[str, list[Copy]]:
        """Return the copies of each source that is only copied to parameters with block scales."""
        copies: dict[str, list[Copy]] = {}
        for copy in traced.copies:
            copies.setdefault(copy.source, []).append(copy)
        scaled = {name.removesuffix(SCALE_SUFFIX) for name in self.named if name.endswith(SCALE_SUFFIX)}
        return {name: each for name, each in copies.items() if name and {copy.parameter for copy in each} <= scaled}

    def _spellings(self, names: Collection[str]) -> dict[str, list[Spelling]]:
        """Return the spellings to try for each name: its own, its aliases, and the names of single experts."""
        found: dict[str, list[Spelling]] = {name: [(name,)] for name in names}
        for alias, name in self.aliases.items():
            if name in found:
                found[name].append((alias,))
        for spellings in found.values():
            stacks = [match for (spelled,) in spellings if (match := _STACK.match(spelled))]
            spellings += (tuple(f"{m[1]}.{{}}.{word}_proj.weight" for word in m[2].split("_")) for m in stacks)
        return found

    def _choose(
        self, samples: Mapping[str, list[Copy]], spellings: Mapping[str, Sequence[Spelling]]
    ) -> dict[str, Spelling]:
        """Return for each sample the first spelling under which the loader takes weight and scales.

        All samples go through one run of the loader, as some loaders wait for several tensors.
        """
        chosen: dict[str, Spelling] = {}
        for turn in range(max((len(spellings[name]) for name in samples), default=0)):
            left = {n: spellings[n][turn] for n in samples if n not in chosen and turn < len(spellings[n])}
            copies: dict[str, list[Copy]] = {}
            for copy in self._traced(left, spellings, turn).copies if left else ():
                copies.setdefault(copy.source, []).append(copy)
            chosen |= {name: each for name, each in left.items() if self._fits(name, each, samples[name], copies)}
        return chosen

    def _traced(
        self, samples: Mapping[str, Spelling], spellings: Mapping[str, Sequence[Spelling]], turn: int
    ) -> Traced:
        """Trace all samples at once; if that fails, within a whole checkpoint, which some loaders need; else one by one."""
        with suppress(Exception):
            return trace_once(self.load, self.named, self._stored(samples))
        with suppress(Exception):
            scaled = {name: each[min(turn, len(each) - 1)] for name, each in spellings.items()}
            others = {name: meta for name, meta in self.sources.items() if name not in scaled}
            return trace_once(self.load, self.named, others | self._stored(scaled))
        return trace_loader(self.load, self.named, self._stored(samples))

    def _stored(self, spelled: Mapping[str, Spelling]) -> dict[str, TensorMeta]:
        """Return codes and scales of the weights of a block-FP8 checkpoint."""
        stored: dict[str, TensorMeta] = {}
        for name, spelling in spelled.items():
            for written, _, shape in stored_as(spelling, self.sources[name].shape):
                stored[written] = TensorMeta(shape=shape, dtype=self.stored.codes.dtype)
                stored[written + self.container.scale_suffix(self.stored)] = TensorMeta(
                    shape=self.container.shape_of(self.stored.scale_shape(shape), self.stored),
                    dtype=self.stored.scale_format.dtype,
                )
        return stored

    def _fits(
        self, name: str, spelling: Spelling, expected: Iterable[Copy], copies: Mapping[str, Iterable[Copy]]
    ) -> bool:
        """Whether the loader puts every block where it belongs, and its scale with it."""
        full_shape = self.sources[name].shape
        found: set[_Place | None] = set()
        for written, start, shape in stored_as(spelling, full_shape):
            weight = set(self._places(copies.get(written, ()), shape))
            scales = copies.get(written + self.container.scale_suffix(self.stored), ())
            if self.stored.is_shared:
                is_taken = bool(scales)  # loaders keep the scales of fused parts apart until all are there
            else:
                blocks = {place and place.in_blocks(self.named, self.stored) for place in weight}
                is_taken = None not in blocks and blocks == set(self._places(scales, self.stored.scale_shape(shape)))
            if not is_taken:
                return False
            found |= {place and place.moved(start) for place in weight}
        return found == set(self._places(expected, full_shape))

    def _places(self, copies: Iterable[Copy], full_shape: tuple[int, ...]) -> Iterator[_Place | None]:
        """Yield where each matrix, or a part of it, goes and comes from; None for what is in another order."""
        for copy in copies:
            pieces = pieces_of(copy, self.named[copy.parameter].shape, full_shape)
            if pieces is None or (len(set(self.stored.block_size)) > 1 and any(p.is_transposed for p in pieces)):
                yield None
                continue
            for piece in pieces:
                for matrix in matrices(piece):
                    yield _Place(
                        copy.parameter, matrix.into, matrix.read, piece.is_transposed and _is_wide(matrix.read)
                    )


def _without_numbers(spelling: Spelling) -> Spelling:
    return tuple(map(without_numbers, spelling))


def _is_wide(ranges: Ranges) -> bool:
    """Whether a box has several rows and several columns, so that transposing it makes a difference."""
    return all(count > 1 for _, count in ranges[-2:])


def _in_blocks(ranges: Ranges, stored: BlockFormat) -> Ranges | None:
    """Return the ranges of blocks in the last two dimensions; None if one begins inside a block."""
    starts, counts = zip(*ranges, strict=True)
    first = stored.block_at(starts)
    return None if first is None else tuple(zip(first, stored.scale_shape(counts), strict=True))
