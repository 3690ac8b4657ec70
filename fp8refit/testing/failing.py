"""Checks of refits that fail halfway: the engine serves the old policy, or nothing until the next good refit."""

from collections.abc import Iterator
from unittest import SkipTest

from torch import Tensor

from fp8refit.errors import InvalidSourceError, RefitError
from fp8refit.sources.source import Manifest, StateDict
from fp8refit.testing.policies import manifest_of, plain_names, policy_of
from fp8refit.testing.promises import hold, listed
from fp8refit.testing.steps import hold_all_or_nothing, hold_fails, restoring, serve, try_bad_values
from fp8refit.testing.subject import Subject


@restoring
def check_bad_values_are_named_and_never_served(subject: Subject) -> None:
    """NaN, Inf and BF16 overflow are named. The engine refuses requests within a second, until a good refit."""
    before = serve(subject)
    names, error = try_bad_values(subject)
    hold(set(error.names) == names, f"NaN or Inf is in {listed(sorted(names))}, but the error names {error.names}")
    hold_all_or_nothing(subject, before, "a refit with NaN and Inf")


@restoring
def check_a_source_that_fails_is_all_or_nothing(subject: Subject) -> None:
    """If the source raises halfway, its error is raised, and the engine serves the old policy or nothing."""
    manifest = manifest_of(subject.policy(1))
    sources: dict[str, tuple[StateDict, Manifest | None]] = {
        "an iterator": (_failing(subject, _SourceError), None),
        "an iterator with manifest": (_failing(subject, _SourceError), manifest),
        "a function with manifest": (lambda: _failing(subject, _SourceError), manifest),
    }
    for kind, (source, announced) in sources.items():
        before = serve(subject)
        situation = f"a refit from {kind} that raises halfway"
        error = hold_fails(subject, Exception, situation, source, manifest=announced)
        hold(
            isinstance(error, _SourceError | RefitError),
            f"{situation} raised {type(error).__name__} ({error}), neither the source's error nor a RefitError",
        )
        hold_all_or_nothing(subject, before, situation)


@restoring
def check_an_interrupt_is_all_or_nothing(subject: Subject) -> None:
    """If a refit is interrupted halfway, the interrupt is raised, and the engine serves the old policy or nothing."""
    before = serve(subject)
    situation = f"a refit that {subject.interrupt.__name__} ends halfway"
    hold_fails(subject, subject.interrupt, situation, _failing(subject, subject.interrupt))
    hold_all_or_nothing(subject, before, situation)


@restoring
def check_a_stream_that_ends_early_is_all_or_nothing(subject: Subject) -> None:
    """If a stream ends early, every missing tensor is named, and the engine serves the old policy or nothing."""
    policy = policy_of(subject, 1)
    came = dict(list(policy.items())[: len(policy) // 2])
    absent = set(plain_names(subject, policy)) - set(came)
    for kind, manifest in {"an iterator": None, "an iterator with manifest": manifest_of(policy)}.items():
        before = serve(subject)
        situation = f"a refit from {kind} that ends after half the tensors"
        error = hold_fails(subject, InvalidSourceError, situation, iter(came.items()), manifest=manifest)
        unnamed = absent - {problem.split(":")[0] for problem in error.problems}
        hold(not unnamed, f"the error of {situation} does not name {listed(sorted(unnamed))}")
        hold_all_or_nothing(subject, before, situation)


@restoring
def check_a_refused_source_does_not_open_a_dirty_engine(subject: Subject) -> None:
    """A refused refit leaves a dirty engine dirty. Only a complete one heals it."""
    before = serve(subject)
    try_bad_values(subject)
    if not subject.refitter().is_dirty:
        raise SkipTest("the engine found NaN before writing, so it is not dirty")
    hold_fails(subject, InvalidSourceError, "a refit from an empty mapping", {})
    hold(subject.refitter().is_dirty, "a refused refit made a dirty engine clean")
    hold_all_or_nothing(subject, before, "a refit that was refused on a dirty engine")


class _SourceError(Exception):
    """The error of a failing source."""


def _failing(subject: Subject, fault: type[BaseException]) -> Iterator[tuple[str, Tensor]]:
    """Yield half of another policy, then raise `fault`."""
    policy = policy_of(subject, 1)
    yield from list(policy.items())[: len(policy) // 2]
    raise fault("the source failed halfway")
