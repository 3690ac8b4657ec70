"""Policies to refit to, good and bad, and which of their tensors a check may spoil."""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from fp8refit.layout import SlotLayout
from fp8refit.sources import Manifest
from fp8refit.testing.subject import Subject

Policy: TypeAlias = dict[str, Tensor]


def policy_of(subject: Subject, seed: int) -> Policy:
    """Policy `seed` in storage of its own."""
    return {name: tensor.detach().clone() for name, tensor in subject.policy(seed).items()}


def manifest_of(policy: Mapping[str, Tensor]) -> Manifest:
    """Shape and dtype of every tensor, by name."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in policy.items()}


def slots_of(subject: Subject, policy: Mapping[str, Tensor]) -> list[SlotLayout]:
    """The slots that only one name of `policy` fills."""
    layout = subject.layout(subject.refitter())
    tied = {*layout.aliases, *layout.aliases.values()}
    return [slot for slot in layout.slots if slot.name in policy and slot.name not in tied]


def plain_names(subject: Subject, policy: Mapping[str, Tensor]) -> list[str]:
    """The names of `policy` that alone fill their slots."""
    return list(dict.fromkeys(slot.name for slot in slots_of(subject, policy)))


def poisoned(subject: Subject, policy: Policy) -> tuple[Policy, set[str]]:
    """`policy` with one value too many in up to three tensors, each in a part that a rank holds, and their names.

    NaN at the very end of a quantized tensor, Inf in the middle of a copied one, and in another quantized one an fp32
    value that is Inf in BF16.
    """
    slots = slots_of(subject, policy)
    quantized = [slot for slot in slots if slot.scale_format is not None]
    copied = [slot for slot in slots if slot.scale_format is None]
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
