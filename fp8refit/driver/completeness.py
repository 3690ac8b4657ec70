"""Decides when a policy is complete whose tensors arrive one by one: what the engine's ranks need, and what has
arrived.
"""

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from itertools import islice
from typing import Any

from pydantic import BaseModel

from fp8refit.config import RefitConfig
from fp8refit.errors import RefitError
from fp8refit.fill.plan import are_unneeded, is_any_of
from fp8refit.live.names import is_kv_scale
from fp8refit.live.slots import FP8_DTYPE, SCALE_SUFFIX, Inventory
from fp8refit.ranks.rank import Rank
from fp8refit.transport.vote import ErrorRecord, merge_errors

_BUFFER = " (a buffer, which named_parameters() leaves out)"


class Claims(BaseModel, frozen=True):
    """The names that a rank needs or accepts."""

    needed: frozenset[str] = frozenset()
    """Names without which a policy is not complete."""
    optional: frozenset[str] = frozenset()
    """Names that may arrive: KV scales."""
    skipped: frozenset[str] = frozenset()
    """Names that may arrive and are ignored; see `Inventory.unneeded` and `RefitConfig.ignore`."""
    aliases: dict[str, str] = {}
    """Second names of tied tensors, with the first name."""
    stacks: dict[str, tuple[str, ...]] = {}
    """Stacked tensors, with the needed names that each contains."""
    buffers: frozenset[str] = frozenset()
    """Needed names that a model's `named_parameters()` leaves out."""
    shared: frozenset[str] = frozenset()
    """Names whose slots share a scale with others: one alone cannot be compared with what the engine holds."""

    @classmethod
    def of(cls, inventory: Inventory) -> "Claims":
        """The claims of one rank."""
        return cls(
            needed=frozenset(slot.name for slot in inventory.slots if not slot.is_optional),
            optional=frozenset(slot.name for slot in inventory.slots if slot.is_optional),
            skipped=frozenset(inventory.unneeded),
            aliases=inventory.aliases,
            stacks={stack.name: tuple(stack.parts) for stack in inventory.stacked},
            buffers=inventory.buffers,
            shared=_sharing(inventory),
        )

    @classmethod
    def union(cls, ranks: Iterable["Claims"]) -> "Claims":
        """The combined claims of all ranks."""
        ranks = list(ranks)
        stacks: dict[str, tuple[str, ...]] = {}
        for rank in ranks:
            for name, parts in rank.stacks.items():
                stacks[name] = (*stacks.get(name, ()), *parts)
        needed = frozenset[str]().union(*(rank.needed for rank in ranks))
        return cls(
            needed=needed,
            optional=frozenset[str]().union(*(rank.optional for rank in ranks)),
            skipped=frozenset[str]().union(*(rank.skipped for rank in ranks)) - needed,
            aliases={alias: name for rank in ranks for alias, name in rank.aliases.items()},
            stacks=stacks,
            buffers=frozenset[str]().union(*(rank.buffers for rank in ranks)),
            shared=frozenset[str]().union(*(rank.shared for rank in ranks)),
        )


def _sharing(inventory: Inventory) -> frozenset[str]:
    """The names of a rank's slots that share a scale with another slot."""
    groups = Counter(slot.group for slot in inventory.slots if slot.group is not None)
    return frozenset(slot.name for slot in inventory.slots if slot.group is not None and groups[slot.group] > 1)


class Kind(Enum):
    """How the ranks treat a name."""

    NEEDED, OPTIONAL, SKIPPED, UNKNOWN = range(4)


class Stream:
    """Tracks which tensors of a policy have arrived. All ranks see the same names in the same order, so they agree.

    Args:
        claims: The claims of all ranks.
        keep: Patterns of names that may be missing.
    """

    def __init__(self, claims: Claims, keep: tuple[str, ...] = ()) -> None:
        self._claims = claims
        self._is_skipped = are_unneeded(claims.skipped)
        is_kept = is_any_of(keep)
        aliases: dict[str, set[str]] = {}
        for alias, name in claims.aliases.items():
            aliases.setdefault(name, set()).add(alias)
        holders = {part: stack for stack, parts in claims.stacks.items() for part in parts}
        self._needed = {
            name
            for name in claims.needed
            if not any(map(is_kept, (name, *aliases.get(name, ()), *([holders[name]] if name in holders else []))))
        }
        self.first: str | None = None
        self.missing, self._firsts = set(self._needed), set[str]()
        self.begin_anew()

    def begin_anew(self, first: str | None = None, held: Iterable[str] = ()) -> None:
        """Start a new policy.

        Args:
            first: The name with which it begins; None if something else says where it ends.
            held: Names whose tensors the engine holds already. They may still come.
        """
        if self.is_whole or first is None:
            self._firsts.clear()
        self._firsts |= {name for name in (self.first, first) if name is not None}
        self.first = first
        self.held = tuple(held)
        self.came: dict[str, None] = {}
        """What has come, in order."""
        self.last: str | None = None
        """What made it whole."""
        self._spelled: dict[str, str] = {}
        self.missing = set(self._needed)
        for name in held:
            self._spelled[self._base(name)] = name.removesuffix(SCALE_SUFFIX)
            self.missing.difference_update(self._parts_of(self._base(name)))

    def may_begin(self, name: str, *, is_served: bool) -> bool:
        """Whether a tensor may be the first of a policy.

        Args:
            name: Its name.
            is_served: Whether the last policy is whole, and served. Then any that is needed may, but not under a second name.
                Otherwise the rest of a policy may still come, and only the first tensor of that one, or of the policy before,
                is certain to be none of it.
        """
        is_needed = self.kind_of(name) is Kind.NEEDED and not self.is_second(name)
        return self.first is None or name in self._firsts or (is_served and is_needed)

    def begins_alike(self, names: Iterable[str]) -> bool:
        """Whether this policy began with these tensors, in this order."""
        names, began = tuple(names), tuple(dict.fromkeys((*self.held, *self.came)))
        return names == began[: len(names)]

    def kind_of(self, name: str) -> Kind:
        """What a name is to the ranks."""
        base = self._base(name)
        claims = self._claims
        if base in self._needed or base in claims.stacks:
            return Kind.NEEDED
        if base in claims.needed or base in claims.optional:
            return Kind.OPTIONAL
        if self._is_skipped(name):
            return Kind.SKIPPED
        return Kind.SKIPPED if is_kv_scale(name) and not claims.optional else Kind.UNKNOWN

    def is_second(self, name: str) -> bool:
        """Whether it is another name of a tied tensor that has arrived."""
        base = name.removesuffix(SCALE_SUFFIX)
        return self._spelled.get(self._base(name), base) != base

    def is_comparable(self, name: str) -> bool:
        """Whether a tensor can be compared alone with what the engine holds."""
        return self._claims.shared.isdisjoint(self._parts_of(self._base(name)))

    def note(self, name: str, tensor: Any) -> None:
        """Record that a tensor has arrived."""
        self.came[name] = None
        base = self._base(name)
        if self.missing:
            self.last = name
        if name.endswith(SCALE_SUFFIX):
            self.missing.discard(base + SCALE_SUFFIX)
            return
        self._spelled.setdefault(base, name)
        self.missing.difference_update(self._parts_of(base))
        scale = name + SCALE_SUFFIX
        if getattr(tensor, "dtype", None) is FP8_DTYPE and scale not in self.came:
            self.missing.add(base + SCALE_SUFFIX)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    def missing_after(self, names: Iterable[str]) -> set[str]:
        """What a new policy would miss that has these tensors."""
        return self._needed.difference(*(self._parts_of(self._base(name)) for name in names))

    def said_missing(self, most: int) -> str:
        """Words for some of what is missing. In constant time: it is said after every call."""
        some = sorted(islice(self.missing, most))
        listed = [f"{name}{_BUFFER if name in self._claims.buffers else ''}" for name in some]
        return ", ".join([*listed, *(["..."] if len(self.missing) > most else [])])

    def _parts_of(self, base: str) -> tuple[str, ...]:
        return self._claims.stacks.get(base, (base,))

    def _base(self, name: str) -> str:
        base = name.removesuffix(SCALE_SUFFIX)
        return self._claims.aliases.get(base, base)


class _Said(BaseModel):
    """What one rank reports."""

    claims: Claims = Claims()
    error: ErrorRecord | None = None


def claims_of_all(rank: Rank, config: RefitConfig) -> Claims:
    """Exchange the claims of all ranks. Every rank calls this together.

    Raises:
        RefitError: A rank cannot be refitted.
    """
    try:
        said = _Said(claims=Claims.of(rank.target.check_ready()))
        if config.prove_trace:
            rank.target.check_proved()
    except RefitError as error:
        said = _Said(error=ErrorRecord.of(error))
    answers = rank.group.exchange(said.model_dump_json().encode(), timeout_s=config.timeout_s)
    ranks = [_Said.model_validate_json(answer) for answer in answers]
    failed = {place: one.error for place, one in enumerate(ranks) if one.error is not None}
    if failed:
        raise merge_errors(failed, num_ranks=len(ranks))
    claims = Claims.union(one.claims for one in ranks)
    return claims.model_copy(update={"skipped": claims.skipped.union(config.ignore)})
