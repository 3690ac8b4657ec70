"""Finds which elements of checkpoint tensors a loader's computations use, by following them backwards from what is written."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8refit.live.slots import TensorMeta
from fp8refit.tracing.boxes import Range, are_whole, ranges_of
from fp8refit.tracing.patterns import runs_of
from fp8refit.tracing.records import CLONES, Computed, Copy, Recipe, Run, View

aten = torch.ops.aten

_CHOOSE = frozenset({aten.index.Tensor, aten.index_select.default})
"""Operations that return some elements of their first input."""
_REORDER = _CHOOSE | {
    aten.cat.default,
    aten.flip.default,
    aten.repeat.default,
    aten.roll.default,
    aten.stack.default,
}
"""Operations whose output elements are input elements."""
_MAKE_NEW = frozenset({aten.new_empty.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default})
"""Operations that use no value of their inputs."""
Part: TypeAlias = Tensor | None
"""True for each element that is used; None if all are."""


def used_by(computed: Sequence[Computed], sources: Mapping[str, TensorMeta]) -> Iterator[Copy]:
    """Yield the elements of checkpoint tensors that computed tensors are made of, as if they were copied.

    Elements are left out by views, and where elements are reordered. All other operations count as using what they are given.

    Args:
        computed: What a loader wrote.
        sources: The checkpoint's tensors.
    """
    used: dict[int, Part] = {}
    """Which elements of each operation's result are used, flat. Missing if none is."""
    partly: dict[str, Tensor] = {}
    """Which elements of checkpoint tensors are used in parts, flat."""
    for each in computed:
        _add(used, each.recipe, each.value, None)
    for step in _last_first(each.recipe for each in computed):
        if id(step) not in used:
            continue
        flat = used[id(step)]
        part = None if flat is None or flat.all() else flat.as_strided(step.size, step.stride)
        for view, part_of_view in _used_inputs(step, part):
            if 0 in view.size or (part_of_view is not None and not part_of_view.any()):
                continue
            base = view.base
            if isinstance(base, Recipe):
                _add(used, base, view, part_of_view)
            elif base.is_parameter:
                continue
            elif part_of_view is None:
                yield _read(base.name, view.offset, zip(view.size, view.stride, strict=True))
            else:
                if base.name not in partly:
                    partly[base.name] = torch.zeros(prod(sources[base.name].shape), dtype=torch.bool, device="cpu")
                _mark(partly[base.name], view, part_of_view)
    for name, flat in partly.items():
        yield from _reads_of(name, flat, sources[name].shape)


def _last_first(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Return the operations that lead to `recipes`, each after all that use its result."""
    found: dict[int, Recipe] = {}

    def visit(step: Recipe) -> None:
        if id(step) not in found:
            for view in step.views():
                if isinstance(view.base, Recipe):
                    visit(view.base)
            found[id(step)] = step

    for recipe in recipes:
        visit(recipe)
    return list(reversed(found.values()))


def _used_inputs(step: Recipe, used: Part) -> Iterator[tuple[View, Part]]:
    """Yield what an operation reads, and which elements of it are used, given those of its result."""
    views = step.views() if step.func not in _MAKE_NEW else []
    if used is None and not _may_leave_out(step):
        yield from ((view, None) for view in views)
    elif used is not None and (step.func in CLONES or torch.Tag.pointwise in step.func.tags):
        yield from ((view, _before_broadcast(used, view.size)) for view in views)
    elif step.func in _REORDER and not (step.func in _CHOOSE and len(views) > 1):
        yield from zip(views, _moved_from(step, views, used), strict=True)
    else:
        yield from ((view, None) for view in views)


def _moved_from(step: Recipe, views: Sequence[View], used: Part) -> Iterator[Tensor]:
    """Repeat an operation that reorders elements with numbers of their places, and yield which of each input are used."""
    firsts = [0, *accumulate(prod(view.size) for view in views)]
    numbers = torch.arange(firsts[-1], device="cpu")
    places = {
        id(view): numbers[first:][: prod(view.size)].view(view.size) for view, first in zip(views, firsts, strict=False)
    }
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.cpu(), (step.args, dict(step.kwargs)))
    made = step.func(*tree_map_only(View, lambda view: places[id(view)], args), **kwargs)
    flags = torch.zeros(firsts[-1], dtype=torch.bool, device="cpu")
    flags[made if used is None else made[used]] = True
    return (flags[places[id(view)]] for view in views)


def _may_leave_out(step: Recipe) -> bool:
    """Whether an operation may leave out elements although all of its result is used."""
    if step.func is not aten.index_select.default:
        return step.func in _CHOOSE
    of, dim, index = step.args
    return isinstance(index, View) or len(index.unique()) < (of.size or (1,))[dim]


def _before_broadcast(used: Tensor, size: tuple[int, ...]) -> Part:
    """Return which elements are used of an input of `size` that was broadcast."""
    if used.ndim < len(size):
        return None
    if used.ndim > len(size):
        used = used.flatten(0, used.ndim - len(size) - 1).any(0)
    for dim, count in enumerate(size):
        if count == 1:
            used = used.any(dim, keepdim=True)
    return used if tuple(used.shape) == size else None


def _add(used: dict[int, Part], step: Recipe, view: View, part: Part) -> None:
    """Note that a view of an operation's result is used, or a part of it."""
    if part is None and not view.offset and are_whole(_runs(zip(view.size, view.stride, strict=True)), step.size):
        used[id(step)] = None
        return
    if id(step) not in used:
        extent = 1 + sum((n - 1) * stride for n, stride in zip(step.size, step.stride, strict=True))
        used[id(step)] = torch.zeros(extent, dtype=torch.bool, device="cpu")
    flat = used[id(step)]
    if flat is not None:
        _mark(flat, view, part)


def _mark(flat: Tensor, view: View, part: Part) -> None:
    """Set the elements of a flat tensor that a view covers, or the part of them that is used."""
    once = [dim for dim, stride in enumerate(view.stride) if not stride]
    size = [1 if dim in once else n for dim, n in enumerate(view.size)]
    covered = flat.as_strided(size, view.stride, view.offset)
    if part is None:
        covered.fill_(True)
    else:
        covered.masked_fill_(part.amax(once, keepdim=True) if once else part, True)


def _reads_of(source: str, flat: Tensor, shape: tuple[int, ...]) -> Iterator[Copy]:
    """Yield reads of the elements of a checkpoint tensor that are used."""
    row, num_rows = (1, 1, *shape)[-1], (1, 1, *shape)[-2]
    kinds, counts = torch.unique_consecutive(flat.view(-1, row), dim=0, return_counts=True)
    first = 0
    for kind, count in zip(kinds, counts.tolist(), strict=True):
        for column, width in ranges_of(kind.nonzero().flatten().tolist()):
            for start, size in _by_matrix(first, count, num_rows):
                yield _read(source, start * row + column, [(size, row), (width, 1)])
        first += count


def _by_matrix(first: int, count: int, num_rows: int) -> Iterator[Range]:
    """Split a range of rows into those of a first matrix, those of whole matrices, and those of a last one."""
    end = first + count
    if first // num_rows == (end - 1) // num_rows:
        yield first, count
        return
    head, tail = -first % num_rows, end % num_rows
    parts = ((first, head), (first + head, count - head - tail), (end - tail, tail))
    yield from (part for part in parts if part[1])


def _read(source: str, start: int, dims: Iterable[tuple[int, int]]) -> Copy:
    """Describe the elements of a view, given sizes and strides, as if they were copied."""
    return Copy(parameter="", into=start, source=source, start=start, runs=_runs(dims))


def _runs(dims: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    return runs_of((size, stride, stride) for size, stride in dims)
