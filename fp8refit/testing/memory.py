"""Checks of memory: the trainer's is not written, shared or kept, and the engine's does not grow."""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor

from fp8refit.errors import RefitError
from fp8refit.sources.source import StateDict
from fp8refit.testing.policies import Policy, poisoned, policy_of
from fp8refit.testing.promises import hold, hold_equal, listed
from fp8refit.testing.steps import refit, restoring
from fp8refit.testing.subject import Subject

NUM_REFITS_FOR_MEMORY = 5


@restoring
def check_the_source_is_left_as_it_was(subject: Subject) -> None:
    """A refit writes nothing into the trainer's tensors, and the engine does not use them as its own."""
    policy = policy_of(subject, 1)
    copies = {name: tensor.clone() for name, tensor in policy.items()}
    sources: dict[str, StateDict] = {"a mapping": policy, "an iterator": iter(policy.items())}
    for kind, source in sources.items():
        refit(subject, source)
        changed = [name for name, tensor in policy.items() if not torch.equal(_raw(tensor), _raw(copies[name]))]
        hold(not changed, f"a refit from {kind} wrote into the source's {listed(changed)}")
    live = subject.live_bytes()
    for tensor in policy.values():
        tensor.zero_()
    hold_equal(live, subject.live_bytes(), "the engine serves the trainer's own storage: writing there changed")


@restoring
def check_the_source_is_let_go(subject: Subject) -> None:
    """After a refit, good or bad, fp8refit does not keep the trainer's tensors alive."""
    attempts: dict[str, tuple[dict[str, Any], Callable[[Policy], Policy], Callable[[Policy], StateDict]]] = {
        "a refit from a mapping": ({}, dict, dict),
        "a refit from a function": ({}, dict, lambda sent: lambda: iter(sent.items())),
        "a refit with NaN": ({}, lambda policy: poisoned(subject, policy)[0], dict),
        'a refit with NaN that validate="strict" refused': (
            {"validate": "strict"},
            lambda policy: poisoned(subject, policy)[0],
            dict,
        ),
        "a refit that was refused for a missing tensor": ({}, lambda policy: dict([*policy.items()][1:]), dict),
    }
    kept = []
    for situation, (options, alter, wrap) in attempts.items():
        sent = alter(policy_of(subject, 1))
        alive = {name: weakref.ref(tensor) for name, tensor in sent.items()}
        with suppress(RefitError):
            subject.refit(subject.refitter(**options), wrap(sent))
        del sent
        gc.collect()
        if names := [name for name, tensor in alive.items() if tensor() is not None]:
            kept.append(f"{situation}: {listed(names)}")
    hold(not kept, "tensors of the source are kept alive by" + "".join(f"\n  - {line}" for line in kept))


@restoring
def check_memory_does_not_grow(subject: Subject) -> None:
    """From the third refit on, no refit leaves more memory allocated than the one before."""
    for seed in (1, 2):
        refit(subject, policy_of(subject, seed))
    gc.collect()
    before = subject.memory_bytes()
    if before is None:
        raise SkipTest("memory_bytes() cannot tell")
    for seed in range(NUM_REFITS_FOR_MEMORY):
        refit(subject, policy_of(subject, seed))
    gc.collect()
    after = subject.memory_bytes()
    hold(
        after is not None and after <= before,
        f"{before} bytes were allocated before {NUM_REFITS_FOR_MEMORY} more refits, and {after} after",
    )


def _raw(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, so that NaN compares equal."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
