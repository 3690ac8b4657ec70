"""The steps of checks: good and bad refits, and what the engine must hold and answer after each."""

import functools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fp8refit.driver.refitter import Refitter
from fp8refit.errors import EngineDirtyError, NonFiniteError, RefitError
from fp8refit.report import RefitReport
from fp8refit.sources.source import Manifest, StateDict
from fp8refit.testing.policies import poisoned, policy_of
from fp8refit.testing.promises import Error, expect, hold, hold_equal
from fp8refit.testing.subject import Check, Subject

REFUSAL_S = 1.0
"""How soon a dirty engine must refuse a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What an engine that serves a whole policy holds and answers."""

    version: int
    live: Mapping[str, object]
    answers: Any

    @classmethod
    def of(cls, subject: Subject) -> "Served":
        """Read the engine's current state."""
        return cls(version=subject.refitter().version, live=dict(subject.live_bytes()), answers=answers_of(subject))

    def hold_bytes(self, subject: Subject, situation: str) -> None:
        """Check that the engine is clean and holds the same bytes."""
        hold(not subject.refitter().is_dirty, f"{situation} left the engine dirty")
        hold_equal(self.live, subject.live_bytes(), f"{situation} left wrong bytes in")

    def hold(self, subject: Subject, situation: str) -> None:
        """Check that the engine is as it was."""
        self.hold_bytes(subject, situation)
        version = subject.refitter().version
        hold(version == self.version, f"{situation} changed version {self.version} to {version}")
        hold(self.answers == answers_of(subject), f"{situation} changed the engine's answers")


def restoring(body: Check) -> Check:
    """Make a check end with the engine on a whole policy and its original KV scales, whatever it did."""

    @functools.wraps(body)
    def check(subject: Subject) -> None:
        kv_scales = subject.kv_scales()
        try:
            body(subject)
        except BaseException:
            with suppress(Exception):  # the error of the body is the one that counts
                _restore(subject, kv_scales)
            raise
        _restore(subject, kv_scales)

    return check


def _restore(subject: Subject, kv_scales: Mapping[str, Sequence[float]] | None) -> None:
    if kv_scales == subject.kv_scales():
        refit(subject, subject.policy(0))
    else:
        assert kv_scales is not None, "kv_scales() gave scales before"
        refit(subject, subject.policy(0), kv_scales={name: values[0] for name, values in kv_scales.items()})


def serve(subject: Subject, seed: int = 0) -> Served:
    """Refit the engine to a whole policy, and read its state."""
    refit(subject, policy_of(subject, seed))
    return Served.of(subject)


def refit(subject: Subject, source: StateDict, refitter: Refitter | None = None, **scales: Any) -> RefitReport:
    """Run a refit that must succeed. `scales` are `calibration` or `kv_scales`."""
    refitter = subject.refitter() if refitter is None else refitter
    try:
        return subject.refit(refitter, source, **scales)
    except RefitError as error:
        raise AssertionError(f"a refit to a whole policy failed: {type(error).__name__}: {error}") from error


def answers_of(subject: Subject) -> Any:
    """Return the engine's answers with empty caches. It must not refuse."""
    try:
        subject.drop_caches()
        return subject.generate()
    except EngineDirtyError as error:
        raise AssertionError(f"the engine refuses requests although it holds a whole policy: {error}") from error


def hold_fails(
    subject: Subject,
    kind: type[Error],
    situation: str,
    source: StateDict,
    *,
    manifest: Manifest | None = None,
    **options: Any,
) -> Error:
    """Run a refit that must raise `kind`, and return the error."""
    return expect(kind, situation, lambda: subject.refit(subject.refitter(**options), source, manifest=manifest))


def try_bad_values(subject: Subject, **options: Any) -> tuple[set[str], NonFiniteError]:
    """Run a refit with bad values that must fail. Return their names and the error."""
    policy, names = poisoned(subject, policy_of(subject, 1))
    error = hold_fails(subject, NonFiniteError, "a refit with NaN and Inf", policy, **options)
    return names, error


def hold_refuses(subject: Subject, situation: str) -> None:
    """Check that the engine refuses requests promptly and keeps none."""
    start_s = time.perf_counter()
    expect(EngineDirtyError, f"a request after {situation}", subject.generate)
    seconds = time.perf_counter() - start_s
    hold(seconds < REFUSAL_S, f"after {situation}, refusing a request took {seconds:.1f} s")
    unfinished = subject.num_unfinished()
    hold(unfinished == 0, f"after {situation}, {unfinished} refused requests remain unfinished")


def hold_serves(subject: Subject, situation: str) -> None:
    """Check that the engine answers requests, whatever its caches."""
    try:
        subject.generate()
    except EngineDirtyError as error:
        raise AssertionError(f"{situation} left the engine refusing requests: {error}") from error


def hold_all_or_nothing(subject: Subject, before: Served, situation: str) -> None:
    """Check that a failed refit left the engine as it was, or refusing requests until the next good refit."""
    if not subject.refitter().is_dirty:
        before.hold(subject, situation)
        return
    hold_refuses(subject, situation)
    version = subject.refitter().version
    hold(version == before.version, f"{situation} changed version {before.version} to {version}")
    healed = serve(subject)
    hold_equal(before.live, healed.live, f"the good refit after {situation} left other bytes than before in")
    hold(healed.answers == before.answers, f"the good refit after {situation} left other answers than before")
