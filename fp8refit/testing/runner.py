"""The list of checks, and how to run them without a test framework."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from unittest import SkipTest

from fp8refit.testing import failing, kv_cache, memory, refusing, serving, sources, threads
from fp8refit.testing.subject import Check, Subject

CHECKS: tuple[Check, ...] = (
    serving.check_serves_exactly_the_new_policy,
    serving.check_live_tensors_keep_their_places,
    serving.check_nothing_is_left_on_the_engine,
    serving.check_versions_count_up_and_are_shared,
    refusing.check_misfits_are_told_all_at_once,
    failing.check_bad_values_are_named_and_never_served,
    refusing.check_strict_writes_nothing_bad,
    failing.check_a_source_that_fails_is_all_or_nothing,
    failing.check_an_interrupt_is_all_or_nothing,
    failing.check_a_stream_that_ends_early_is_all_or_nothing,
    failing.check_a_refused_source_does_not_open_a_dirty_engine,
    threads.check_one_refit_at_a_time,
    threads.check_requests_meet_no_half_written_policy,
    refusing.check_a_busy_engine_is_left_alone,
    refusing.check_sleeping_weights_are_not_written,
    refusing.check_caches_that_stay_keep_the_old_policy,
    serving.check_no_answer_from_the_old_policys_cache,
    sources.check_every_kind_of_source_gives_the_same_bytes,
    sources.check_prequantized_tensors_are_copied,
    sources.check_tied_names_may_be_sent_or_not,
    serving.check_closing_keeps_version_and_state,
    memory.check_the_source_is_left_as_it_was,
    memory.check_the_source_is_let_go,
    memory.check_memory_does_not_grow,
    kv_cache.check_scales_fit_the_policy_that_is_served,
    kv_cache.check_calibrating_alone_gives_the_scales_of_a_refit,
    kv_cache.check_scales_stay_without_calibration,
    kv_cache.check_given_scales_are_written_exactly,
    kv_cache.check_scales_are_read,
    kv_cache.check_bad_scales_and_batches_write_nothing,
    kv_cache.check_a_dirty_engine_is_not_calibrated,
)
"""Every check. Its docstring states the promise."""


class Outcome(StrEnum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The result of one check."""

    name: str
    """Name of the check, without `check_`."""
    outcome: Outcome
    message: str = ""
    """Why it failed or was skipped."""

    def __str__(self) -> str:
        return f"{self.outcome:<7} {self.name}" + (f": {self.message}" if self.message else "")


def run_checks(subject: Subject, *, only: Collection[str] | None = None) -> list[CheckResult]:
    """Run the checks one after another.

    Args:
        subject: The engine under test.
        only: Names of checks, without `check_`; all of them by default.

    Returns:
        One result per check, in the order of `CHECKS`.

    Raises:
        ValueError: `only` names a check that does not exist.
    """
    unknown = set(only or ()) - {name_of(check) for check in CHECKS}
    if unknown:
        raise ValueError(f"no such check: {', '.join(sorted(unknown))}")
    return [_result_of(check, subject) for check in CHECKS if only is None or name_of(check) in only]


def name_of(check: Check) -> str:
    """Name of a check, without `check_`."""
    return check.__name__.removeprefix("check_")


def _result_of(check: Check, subject: Subject) -> CheckResult:
    outcome, message = Outcome.PASSED, ""
    try:
        check(subject)
    except SkipTest as reason:
        outcome, message = Outcome.SKIPPED, str(reason)
    except AssertionError as error:
        outcome, message = Outcome.FAILED, str(error)
    except Exception as error:  # noqa: BLE001 - whatever an adapter raises is a finding
        outcome, message = Outcome.FAILED, f"{type(error).__name__}: {error}"
    return CheckResult(name=name_of(check), outcome=outcome, message=message)
