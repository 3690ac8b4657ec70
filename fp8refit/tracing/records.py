"""What a trace finds: copies, computations to be repeated, and anything else that a loader does."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten

CLONES = frozenset({aten.clone.default, aten._to_copy.default})


class Run(NamedTuple):
    """Elements `stride` apart in one tensor, written to places `into` apart in another."""

    size: int
    into: int
    stride: int


class Copy(NamedTuple):
    """One copy into a parameter: which elements it writes, and where in a checkpoint tensor they come from.

    A tuple, like `Run`: a mixture-of-experts model has 18,000, and dataclasses take three times as long to make and compare.
    """

    parameter: str
    into: int
    """First element written, in the parameter's storage."""
    source: str
    """Checkpoint name; empty if the loader writes zeros."""
    start: int
    """First element read, in the checkpoint tensor's row-major order."""
    runs: tuple[Run, ...]
    """Outermost first; empty for a single element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objection:
    """Something a loader does with a checkpoint tensor or a parameter other than copy."""

    source: str
    parameter: str
    """Empty if no parameter was reached."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class View:
    """A view of a tensor that exists when a recipe is carried out."""

    base: "Recipe | Base"
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, values: "Mapping[Base, Tensor]") -> Tensor:
        """Return the tensor, given the values of its bases."""
        base = self.base.made_of(values) if isinstance(self.base, Recipe) else values[self.base]
        return base.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The start of a recipe: a checkpoint tensor, or a parameter after checkpoint tensors were copied into it."""

    name: str
    is_parameter: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recipe:
    """One operation of a loader, to be repeated with values."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def made_of(self, values: Mapping[Base, Tensor]) -> Tensor:
        """Return its result, on the device of `values` and with its original strides."""
        device = next(iter(values.values())).device
        args, kwargs = tree_map_only(View, lambda view: view.of(values), (self.args, dict(self.kwargs)))
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        args, kwargs = tree_map_only(torch.device, lambda _: device, (args, kwargs))
        made: Tensor = self.func(*args, **kwargs)
        if made.stride() == self.stride:
            return made
        return torch.empty_strided(self.size, self.stride, dtype=made.dtype, device=device).copy_(made)

    def steps(self) -> "Iterator[Recipe]":
        """Yield this operation and those before it."""
        yield self
        for leaf in self.views():
            if isinstance(leaf.base, Recipe):
                yield from leaf.base.steps()

    def views(self) -> list[View]:
        """The views that the operation reads."""
        leaves = tree_leaves((self.args, dict(self.kwargs)), is_leaf=lambda leaf: isinstance(leaf, View))
        return [leaf for leaf in leaves if isinstance(leaf, View)]

    def bases(self) -> frozenset[Base]:
        """The tensors it starts from."""
        return frozenset(view.base for step in self.steps() for view in step.views() if isinstance(view.base, Base))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Computed:
    """A copy of a computed tensor into a parameter."""

    parameter: str
    into: Copy
    """Which elements are written. Nothing is read."""
    value: View
    """The result of a recipe, in the size that is written."""

    @property
    def recipe(self) -> Recipe:
        """The operation to repeat."""
        assert isinstance(self.value.base, Recipe), f"{self.value.base=}"
        return self.value.base


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """What a loader did with every tensor it got."""

    copies: tuple[Copy, ...]
    computed: tuple[Computed, ...] = ()
    objections: tuple[Objection, ...] = ()
    casts: frozenset[tuple[str, torch.dtype]] = frozenset()
    """Checkpoint tensors, and the dtypes that they are cast to on their way. Copies do not tell."""

    @property
    def taken(self) -> frozenset[str]:
        """Names of the checkpoint tensors of which it made something."""
        copied = (copy.source for copy in self.copies)
        return frozenset(copied).union(base.name for each in self.computed for base in each.recipe.bases())

    def without(self, parameters: Collection[str]) -> "Traced":
        """Return what it did with the others."""
        return replace(
            self,
            copies=tuple(each for each in self.copies if each.parameter not in parameters),
            computed=tuple(each for each in self.computed if each.parameter not in parameters),
            objections=tuple(each for each in self.objections if each.parameter not in parameters),
        )

    def with_all(self, others: "Iterable[Traced]") -> "Traced":
        """Return what this and other traces found."""
        every = (self, *others)
        return Traced(
            copies=tuple(copy for each in every for copy in each.copies),
            computed=tuple(computed for each in every for computed in each.computed),
            objections=tuple(objection for each in every for objection in each.objections),
            casts=frozenset().union(*(each.casts for each in every)),
        )
