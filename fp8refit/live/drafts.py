"""Adds a model that drafts tokens to the one that it drafts for: a refit writes both, in one commit."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from fp8refit.live.slots import Inventory, Refusal, Write

T = TypeVar("T")
DRAFT = "draft."
"""Begins the names of what is in a draft's own checkpoint."""
_LIVE = "draft model: "


def with_draft(target: Inventory, draft: Inventory, *, shared: Mapping[str, str]) -> Inventory:
    """What a refit of both models writes. A tensor of which each holds a copy of its own is written to both.

    Args:
        target: What is written of the engine's own model.
        draft: What is written of the draft alone.
        shared: Names for what the draft has of the target, and the target's own. A source may send either or both.
    """
    taken = target.names - set(target.unneeded)
    aliases = {**draft.aliases, **shared}
    held = {each.data_ptr for each in target.live}

    def find_copies(are_restored: bool, at_a_glance: bool) -> list[Refusal]:
        return [*target.find_copies(are_restored, at_a_glance), *draft.find_copies(are_restored, at_a_glance)]

    def prove(write: Write, device: torch.device) -> tuple[Refusal, ...]:
        proofs = [each.prove for each in (target, draft) if each.prove is not None]
        return tuple(refusal for proof in proofs for refusal in proof(write, device))

    return replace(
        target,
        slots=(*target.slots, *draft.slots),
        live=(*target.live, *(replace(e, name=_LIVE + e.name) for e in draft.live if e.data_ptr not in held)),
        aliases={name: first for name, first in aliases.items() if name not in taken} | target.aliases,
        unneeded=tuple(dict.fromkeys((*target.unneeded, *(name for name in draft.unneeded if name not in taken)))),
        stacked=(*target.stacked, *draft.stacked),
        buffers=target.buffers | draft.buffers,
        written_as={**draft.written_as, **target.written_as},
        padding=(*target.padding, *draft.padding),
        refreshes=(*target.refreshes, *draft.refreshes),
        refusals=(*target.refusals, *(replace(each, module=_LIVE + each.module) for each in draft.refusals)),
        partly_read={**draft.partly_read, **target.partly_read},
        find_copies=find_copies,
        prove=prove if target.prove is not None or draft.prove is not None else None,
    )


def named_apart(inventory: Inventory, prefix: str) -> Inventory:
    """The same with other names, for a draft whose checkpoint is its own, so that it may have the names of the target's."""

    def named(found: Mapping[str, T]) -> dict[str, T]:
        return {prefix + name: value for name, value in found.items()}

    return replace(
        inventory,
        slots=tuple(replace(slot, name=prefix + slot.name) for slot in inventory.slots),
        aliases={name: prefix + first for name, first in named(inventory.aliases).items()},
        unneeded=tuple(prefix + name for name in inventory.unneeded),
        stacked=tuple(replace(s, name=prefix + s.name, parts=named(s.parts)) for s in inventory.stacked),
        buffers=frozenset(prefix + name for name in inventory.buffers),
        written_as=named(inventory.written_as),
        partly_read=named(inventory.partly_read),
    )
