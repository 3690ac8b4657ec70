"""Good and bad policies to refit to, and which of their tensors a check may spoil."""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from fp8refit.live.layout import SlotLayout
from fp8refit.sources.source import Manifest
from fp8refit.testing.subject import Subject

Policy: TypeAlias = dict[str, Tensor]


def policy_of(subject: Subject, seed: int) -> Policy:
    """Copy policy `seed` into new storage."""
    return {name: tensor.detach().clone() for name, tensor in subject.policy(seed).items()}


def manifest_of(policy: Mapping[str, Tensor]) -> Manifest:
    """Return the shape and dtype of every tensor, by name."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in policy.items()}


def slots_of(subject: Subject, policy: Mapping[str, Tensor]) -> list[SlotLayout]:
    """Return the slots that only one name of `policy` fills."""
    layout = subject.layout(subject.refitter())
    tied = {*layout.aliases, *layout.aliases.values()}
    return [slot for slot in layout.slots if slot.name in policy and slot.name not in tied]


def plain_names(subject: Subject, policy: Mapping[str, Tensor]) -> list[str]:
    """Return the names in `policy` whose slots have no other name."""
    return list(dict.fromkeys(slot.name for slot in slots_of(subject, policy)))


def poisoned(subject: Subject, policy: Policy) -> tuple[Policy, set[str]]:
    """Spoil one value in up to three tensors of `policy`, each in a part that a rank holds. Return it and their names.

    NaN at the end of a quantized tensor, Inf in the middle of a copied one, and in another quantized one an fp32 value
    that becomes Inf in BF16.
    """
    slots = slots_of(subject, policy)
    quantized = [slot for slot in slots if slot.format is not None]
    copied = [slot for slot in slots if slot.format is None]
    poisons = [(slot, torch.nan, 1) for slot in quantized[:1]] + [(slot, torch.inf, 2) for slot in copied[:1]]
    if len(quantized) > 1 and quantized[-1].name != quantized[0].name:
        policy[quantized[-1].name] = policy[quantized[-1].name].float()
        poisons.append((quantized[-1], torch.finfo(torch.float32).max, 1))
    for slot, value, part in poisons:
        end = (start + length for start, length in zip(slot.offset, slot.shape, strict=True))
        index = tuple(
            start + (stop - start) // part - (part == 1) for start, stop in zip(slot.offset, end, strict=True)
        )
        policy[slot.name][index] = value
    return policy, {slot.name for slot, _, _ in poisons}
