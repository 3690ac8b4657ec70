"""Checks of good refits: what the engine then holds, answers and counts."""

from unittest import SkipTest

from fp8refit.errors import InvalidSourceError
from fp8refit.testing.policies import policy_of
from fp8refit.testing.promises import differing, hold, hold_equal, listed
from fp8refit.testing.steps import Served, hold_all_or_nothing, hold_fails, refit, restoring, serve, try_bad_values
from fp8refit.testing.subject import Subject


@restoring
def check_serves_exactly_the_new_policy(subject: Subject) -> None:
    """After every refit, all live bytes and all answers are the new policy's."""
    served: dict[int, Served] = {}
    for seed in (0, 1, 2, 0):
        now = serve(subject, seed)
        hold(bool(now.live), "live_bytes() gives no tensor")
        hold_equal(subject.expected_bytes(subject.policy(seed)), now.live, "a refit left wrong bytes in")
        before = served.setdefault(seed, now)
        hold_equal(before.live, now.live, f"policy {seed} gave other bytes the second time, in")
        hold(before.answers == now.answers, f"policy {seed} gave other answers the second time")
    same = [name for name in served[0].live if served[0].live[name] == served[1].live.get(name)]
    hold(len(same) < len(served[0].live), "two policies left the same live bytes: are these the live ones?")
    hold(served[0].answers != served[1].answers, "two policies gave the same answers: are they the engine's?")


@restoring
def check_live_tensors_keep_their_places(subject: Subject) -> None:
    """A refit keeps identity, address, shape, stride and dtype of every live tensor."""
    serve(subject)
    before = subject.places()
    hold(bool(before), "places() gives no tensor")
    for seed in (1, 2):
        serve(subject, seed)
        moved = differing(before, subject.places())
        hold(not moved, f"the refit moved {listed(moved)}; CUDA graphs and views of them are stale now")


@restoring
def check_nothing_is_left_on_the_engine(subject: Subject) -> None:
    """After a successful refit (first, later or healing), the request path is entirely the engine's own."""
    if subject.traces() is None:
        raise SkipTest("traces() cannot tell")
    serve(subject)
    _hold_no_traces(subject, "a refit")
    try_bad_values(subject)
    serve(subject)
    _hold_no_traces(subject, "a refit that came after a failed one")


@restoring
def check_versions_count_up_and_are_shared(subject: Subject) -> None:
    """Every success raises the version by one, for every `Refitter` of the engine. A failure does not."""
    first, second = subject.refitter(), subject.refitter(validate="strict")
    start = refit(subject, policy_of(subject, 0), first).version
    for step, refitter in enumerate((second, first, second), start=1):
        report = refit(subject, policy_of(subject, step), refitter)
        seen = (report.version, first.version, second.version, subject.refitter().version)
        hold(
            seen == (start + step,) * 4,
            f"after {step} more refits version {start} should be {start + step} everywhere, but the report says {seen[0]} "
            f"and three refitters of the engine say {seen[1:]}",
        )
    hold_fails(subject, InvalidSourceError, "a refit from an empty mapping", {})
    hold(first.version == start + 3, f"a refused refit changed version {start + 3} to {first.version}")


@restoring
def check_no_answer_from_the_old_policys_cache(subject: Subject) -> None:
    """After a refit, prompts asked before are answered as by an engine that never saw them."""
    clean = [serve(subject, seed).answers for seed in (0, 1)]
    subject.drop_caches()
    for seed in (0, 1, 0):
        subject.generate()  # fills caches that the refit must drop
        refit(subject, policy_of(subject, seed))
        hold(
            subject.generate() == clean[seed],
            "after a refit, a prompt asked before got another answer than an engine with empty caches gives: "
            "something computed under the old policy was reused",
        )


@restoring
def check_closing_keeps_version_and_state(subject: Subject) -> None:
    """`close()` only drops the plan: version and dirty state stay, and a later refit works."""
    refitter, expected = subject.refitter(), serve(subject, 1)
    version = refit(subject, policy_of(subject, 0), refitter).version
    subject.close(refitter)
    seen = (subject.refitter().version, refitter.version)
    hold(seen == (version, version), f"close() changed version {version} to {seen[0]}")
    report = refit(subject, policy_of(subject, 1), refitter)
    hold(report.version == version + 1, f"the refit after close() changed version {version} to {report.version}")
    expected.hold_bytes(subject, "the refit after close()")
    before = serve(subject)
    try_bad_values(subject)
    was_dirty = refitter.is_dirty
    subject.close(refitter)
    hold(refitter.is_dirty == was_dirty, "close() made a dirty engine clean")
    hold_all_or_nothing(subject, before, "close() after a failed refit")


def _hold_no_traces(subject: Subject, situation: str) -> None:
    traces = subject.traces()
    hold(not traces, f"{situation} left {listed(traces or ())} on the engine")
