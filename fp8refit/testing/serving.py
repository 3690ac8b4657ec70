"""Checks of good refits: what the engine holds, says and counts after them."""

from unittest import SkipTest

from fp8refit.errors import InvalidSourceError
from fp8refit.testing.policies import policy_of
from fp8refit.testing.promises import differing, hold, listed
from fp8refit.testing.steps import Served, hold_all_or_nothing, hold_fails, refit, restoring, serve, try_bad_values
from fp8refit.testing.subject import Subject


@restoring
def check_serves_exactly_the_new_policy(subject: Subject) -> None:
    """After a refit every live byte is the new policy's, refit after refit, and so are the answers."""
    served: dict[int, Served] = {}
    for seed in (0, 1, 2, 0):
        now = serve(subject, seed)
        hold(bool(now.live), "live_bytes() gives no tensor")
        wrong = differing(subject.expected_bytes(subject.policy(seed)), now.live)
        hold(not wrong, f"a refit left wrong bytes in {listed(wrong)}")
        before = served.setdefault(seed, now)
        changed = differing(before.live, now.live)
        hold(not changed, f"policy {seed} gave other bytes the second time, in {listed(changed)}")
        hold(before.answers == now.answers, f"policy {seed} gave other answers the second time")
    same = [name for name in served[0].live if served[0].live[name] == served[1].live.get(name)]
    hold(len(same) < len(served[0].live), "two policies left the same live bytes: are these the live ones?")
    hold(served[0].answers != served[1].answers, "two policies gave the same answers: are they the engine's?")


@restoring
def check_live_tensors_keep_their_places(subject: Subject) -> None:
    """A refit leaves identity, address, shape, stride and dtype of every live tensor as they were."""
    serve(subject)
    before = subject.places()
    hold(bool(before), "places() gives no tensor")
    for seed in (1, 2):
        serve(subject, seed)
        moved = differing(before, subject.places())
        hold(not moved, f"the refit moved {listed(moved)}; CUDA graphs and views of them are stale now")


@restoring
def check_nothing_is_left_on_the_engine(subject: Subject) -> None:
    """Once a refit has succeeded, be it the first, a later one or a healing one, the request path is the engine's own."""
    if subject.traces() is None:
        raise SkipTest("traces() cannot tell")
    serve(subject)
    _hold_no_traces(subject, "a refit")
    try_bad_values(subject)
    serve(subject)
    _hold_no_traces(subject, "a refit that came after a failed one")


@restoring
def check_versions_count_up_and_are_shared(subject: Subject) -> None:
    """Every success raises the version by one, for every `Refitter` of the engine; a failure does not."""
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
    hold(first.version == start + 3, f"a refit that was refused made version {start + 3} {first.version}")


@restoring
def check_no_answer_from_the_old_policys_cache(subject: Subject) -> None:
    """A prompt that was asked before a refit is answered after it as by an engine that never saw it."""
    clean = [serve(subject, seed).answers for seed in (0, 1)]
    subject.drop_caches()
    for seed in (0, 1, 0):
        subject.generate()  # what it caches must not survive the refit
        refit(subject, policy_of(subject, seed))
        hold(
            subject.generate() == clean[seed],
            "a prompt that was asked before a refit got another answer after it than an engine with empty caches gives: "
            "something computed under the old policy was used again",
        )


@restoring
def check_closing_keeps_version_and_state(subject: Subject) -> None:
    """`close()` gives back the plan alone: version and dirt stay, and a later refit works."""
    refitter, expected = subject.refitter(), serve(subject, 1)
    version = refit(subject, policy_of(subject, 0), refitter).version
    subject.close(refitter)
    seen = (subject.refitter().version, refitter.version)
    hold(seen == (version, version), f"close() made version {version} {seen[0]}")
    report = refit(subject, policy_of(subject, 1), refitter)
    hold(report.version == version + 1, f"the refit after close() made version {version} {report.version}")
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
