"""Checks what arrives in a stream: finds each tensor's steps, and makes sure that all arrive and none arrives twice."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fp8refit.errors import InvalidSourceError
from fp8refit.fill.plan import PlanBuilder, RefitPlan, Step
from fp8refit.live.slots import TensorMeta
from fp8refit.sources.row_runs import Piece


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The expected tensors and their steps."""

    plan: RefitPlan
    steps: Mapping[str, Sequence[Step]]
    """Steps by source tensor."""
    metadata: Mapping[str, TensorMeta] | None = None
    """All expected tensors; None if they need no check."""

    @classmethod
    def of(cls, plan: RefitPlan, metadata: Mapping[str, TensorMeta]) -> "Expected":
        """The tensors of a plan."""
        return cls(plan=plan, steps=by_source((*plan.steps, *plan.seconds)), metadata=metadata)

    @cached_property
    def firsts(self) -> Mapping[str, str]:
        """Every tensor that comes under two names, and a name that stands for both."""
        ties = {name: first for name, (first, _) in self.plan.ties.items()}
        return ties | {first: first for first in ties.values()}


class Arrivals:
    """The tensors of one stream.

    Args:
        expected: The expected tensors; None if unknown.
        make_builder: Starts a plan for tensors that arrive unexpectedly; None if all were announced, so that it is an error.

    Attributes:
        expected: The expected tensors; None if they are planned on arrival.
        plan: The plan of an announced stream; None for others, whose plan is certain only once all tensors have arrived.
    """

    def __init__(self, expected: Expected | None, *, make_builder: Callable[[], PlanBuilder] | None = None) -> None:
        self.expected = expected
        self.plan = expected.plan if expected is not None and make_builder is None else None
        self._make_builder = make_builder
        self._builder = make_builder() if expected is None and make_builder is not None else None
        self._names: set[str] = set()
        self._firsts = expected.firsts if expected is not None else {}
        self._came_as: dict[str, str] = {}
        """The name under which each tensor came first that has two."""

    @property
    def came(self) -> Iterable[str]:
        """Names that have arrived."""
        return self._builder.seen if self._builder is not None else self._names

    def are_new(self, names: Iterable[str]) -> bool:
        """Whether everything so far was expected, none of these names has arrived, and each is the only one of its tensor."""
        return self._builder is None and self._names.isdisjoint(names) and self._firsts.keys().isdisjoint(names)

    def note_new(self, name: str) -> bool:
        """Note the arrival of an expected tensor; False if one has to ask for its steps."""
        if self._builder is not None or name in self._names or name in self._firsts:
            return False
        self._names.add(name)
        return True

    def note(self, names: Iterable[str]) -> None:
        """Note the arrival of tensors that are as expected."""
        self._names.update(names)

    def steps_of(self, name: str, meta: TensorMeta) -> Sequence[Step]:
        """The steps of the next tensor.

        Raises:
            InvalidSourceError: It was not announced, or has arrived already.
        """
        expected = self.expected
        if expected is not None:
            metadata = expected.metadata
            is_other = metadata is not None and metadata.get(name) != meta
            if self._make_builder is None:
                self._check_was_announced(name, meta, expected)
            elif is_other or name in self._names:
                self._plan_again(expected, self._make_builder)
        if self._builder is not None:
            return self._builder.add(name, meta)
        assert expected is not None, "otherwise it is planned on arrival"
        self._names.add(name)
        return expected.steps.get(name, ())

    def announced_steps(self, name: str) -> Sequence[Step]:
        """The steps of a tensor that was announced, whether it has arrived or not."""
        return self.expected.steps.get(name, ()) if self.expected is not None else ()

    def is_settled(self, name: str) -> bool:
        """Whether a tensor's steps will be the same in the next stream: it may come first then, or second."""
        return name not in self._firsts

    def is_second(self, name: str) -> bool:
        """Whether a tensor, whose steps were asked for, has come before under another name."""
        if self._builder is not None:
            return name in self._builder.seconds
        first = self._firsts.get(name)
        return first is not None and self._came_as.setdefault(first, name) != name

    def finish(self) -> Expected:
        """Check that everything arrived, and return what did: `expected`, unless it was planned on arrival.

        Raises:
            InvalidSourceError: Tensors are missing, or do not fit.
        """
        came, make_builder = self.expected, self._make_builder
        if came is not None and make_builder is not None and len(self._names) < len(came.metadata or ()):
            self._plan_again(came, make_builder)
        if self._builder is not None:
            came = Expected.of(self._builder.finish(), self._builder.seen)
        assert came is not None, "otherwise it was planned on arrival"
        absent = [name for name in came.steps if make_builder is None and name not in self._names]
        if absent:
            raise InvalidSourceError([f"{name}: was announced but did not arrive" for name in absent])
        return came

    def _check_was_announced(self, name: str, meta: TensorMeta, expected: Expected) -> None:
        """Check that a tensor arrives only once, and as announced.

        Raises:
            InvalidSourceError: It does not.
        """
        if name in self._names:
            raise InvalidSourceError([f"{name}: sent twice; send it once"])
        if expected.metadata is not None and expected.metadata.get(name) != meta:
            announced = expected.metadata.get(name, "nothing of that name")
            raise InvalidSourceError([f"{name}: arrived as {meta}, but {announced} was announced"])

    def _plan_again(self, expected: Expected, make_builder: Callable[[], PlanBuilder]) -> None:
        """Plan what arrived, and plan the rest on arrival: the stream is not like the last one."""
        assert expected.metadata is not None, "nothing else is judged twice"
        self.expected, self._firsts, self._builder = None, {}, make_builder()
        for name in self._names:
            self._builder.add(name, expected.metadata[name])


@dataclass(kw_only=True, slots=True)
class CutTensor:
    """A tensor whose first rows have arrived."""

    name: str
    full_shape: tuple[int, ...]
    steps: Sequence[Step]
    next_row: int = 0
    whole: Tensor | None = None
    """Where its rows are kept until all have arrived, if its slots may share scales with others."""

    @property
    def is_complete(self) -> bool:
        """Whether all of its rows have arrived."""
        return self.next_row == (self.full_shape[0] if self.full_shape else 0)

    def check_is_complete(self) -> None:
        """Check that all of its rows have arrived.

        Raises:
            InvalidSourceError: They have not.
        """
        if not self.is_complete:
            raise InvalidSourceError([f"{self.name}: is incomplete: got {self.next_row} of {self.full_shape[0]} rows"])

    def check_follows(self, piece: Piece) -> None:
        """Check that rows follow the last ones.

        Raises:
            InvalidSourceError: They do not.
        """
        came = f"{piece.name}: rows {piece.first_row} to {piece.end_row} of {list(piece.full_shape)}"
        is_next = (piece.first_row, piece.full_shape) == (self.next_row, self.full_shape)
        if not is_next or piece.end_row > (self.full_shape[0] if self.full_shape else 0):
            raise InvalidSourceError(
                [f"{came} are out of order: expected row {self.next_row} of {list(self.full_shape)}"]
            )
        if tuple(piece.tensor.shape[1:]) != self.full_shape[1:]:
            raise InvalidSourceError([f"{came} came with the shape {list(piece.tensor.shape)}"])


def by_source(steps: Iterable[Step]) -> dict[str, list[Step]]:
    """The steps of each source tensor."""
    grouped: dict[str, list[Step]] = {}
    for step in steps:
        grouped.setdefault(step.source, []).append(step)
    return grouped
