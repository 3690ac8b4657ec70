"""Checks of refits that are refused before the first byte is written: the engine keeps serving as before."""

from typing import TypeVar
from unittest import SkipTest

import torch

from fp8refit.errors import CacheFlushError, EngineAsleepError, EngineBusyError, InvalidSourceError
from fp8refit.sources.source import StateDict
from fp8refit.testing.policies import plain_names, policy_of
from fp8refit.testing.promises import hold, listed
from fp8refit.testing.steps import hold_fails, hold_serves, restoring, serve, try_bad_values
from fp8refit.testing.subject import Subject

Context = TypeVar("Context")


@restoring
def check_misfits_are_told_all_at_once(subject: Subject) -> None:
    """Missing, unexpected, misshapen and wrongly typed tensors are named in one error. Nothing is written."""
    before = serve(subject)
    policy = policy_of(subject, 1)
    names = plain_names(subject, policy)
    hold(len(names) >= 3, f"the policy has {len(names)} tensors with a slot of their own; the check needs 3")
    misshapen, mistyped, absent = names[0], names[1], names[-1]
    unexpected = "model.layers.9999.mlp.up_proj.weight"
    policy[unexpected] = policy.pop(absent)
    policy[misshapen] = torch.cat([policy[misshapen], policy[misshapen]])
    policy[mistyped] = policy[mistyped].to(torch.int32)
    sources: dict[str, StateDict] = {"a mapping": policy, "a function": lambda: iter(policy.items())}
    for kind, source in sources.items():
        error = hold_fails(subject, InvalidSourceError, f"a refit from {kind} with four faults", source)
        named = {problem.split(":")[0] for problem in error.problems}
        expected = {absent, unexpected, misshapen, mistyped}
        hold(
            named == expected,
            f"one error should name {listed(sorted(expected))}, but this one names {listed(sorted(named))}: {error}",
        )
        before.hold(subject, f"a refused refit from {kind}")


@restoring
def check_strict_writes_nothing_bad(subject: Subject) -> None:
    """With `validate="strict"`, NaN and Inf are found before the first byte is written, and the engine keeps serving."""
    before = serve(subject)
    names, error = try_bad_values(subject, validate="strict")
    hold(set(error.names) == names, f"NaN or Inf is in {listed(sorted(names))}, but the error names {error.names}")
    before.hold(subject, 'a refit that validate="strict" refused')


@restoring
def check_a_busy_engine_is_left_alone(subject: Subject) -> None:
    """An engine with unfinished requests is not refitted, and the requests are answered normally."""
    before = serve(subject)
    answers = []
    for is_disturbed in (False, True):
        subject.drop_caches()
        with _brought_about("busy()", subject.busy()) as finish:
            unfinished = subject.num_unfinished()
            hold(unfinished > 0, "busy() gave the engine a request, but num_unfinished() is 0")
            if is_disturbed:
                situation = "a refit of an engine with unfinished requests"
                hold_fails(subject, EngineBusyError, situation, policy_of(subject, 1))
                remaining = subject.num_unfinished()
                hold(remaining == unfinished, f"the refused refit left {remaining} of {unfinished} requests")
            answers.append(finish())
    hold(answers[0] == answers[1], "a refused refit changed the answer of a request that was running")
    before.hold(subject, "a refit that was refused because the engine was busy")


@restoring
def check_sleeping_weights_are_not_written(subject: Subject) -> None:
    """An engine whose weights sleep is not refitted. Once awake, it serves the old policy."""
    before = serve(subject)
    with _brought_about("asleep()", subject.asleep()):
        hold_fails(subject, EngineAsleepError, "a refit of an engine whose weights sleep", policy_of(subject, 1))
    before.hold(subject, "a refit that was refused because the weights slept")


@restoring
def check_caches_that_stay_keep_the_old_policy(subject: Subject) -> None:
    """If the engine keeps its caches, nothing is written, and it keeps serving the old policy."""
    before = serve(subject)
    context = _brought_about("unflushable()", subject.unflushable())
    policy = policy_of(subject, 1)
    sources: dict[str, StateDict] = {"a mapping": policy, "an iterator": iter(policy.items())}
    with context:
        for kind, source in sources.items():
            situation = f"a refit from {kind} of an engine that keeps its caches"
            hold_fails(subject, CacheFlushError, situation, source)
            before.hold_bytes(subject, situation)
            hold_serves(subject, situation)
    before.hold(subject, "a refit of an engine that keeps its caches")


def _brought_about(situation: str, context: Context | None) -> Context:
    """Return the context of a situation that the subject can bring about. Otherwise skip the check."""
    if context is None:
        raise SkipTest(f"{situation} cannot be brought about")
    return context
