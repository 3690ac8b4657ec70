"""Checks that another thread can neither start a second refit nor meet a half-written policy."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from torch import Tensor

from fp8refit.errors import EngineBusyError, EngineDirtyError
from fp8refit.report import RefitReport
from fp8refit.testing.policies import Policy, policy_of
from fp8refit.testing.promises import expect, hold
from fp8refit.testing.steps import hold_fails, refit, restoring, serve
from fp8refit.testing.subject import Subject

OTHER_THREAD_S = 5.0
"""How long a stream waits for another thread's attempt."""


@restoring
def check_one_refit_at_a_time(subject: Subject) -> None:
    """During a refit, another one and `close()` are refused at once, and the first ends normally."""
    expected, before = serve(subject, 1), serve(subject)
    policy, other = policy_of(subject, 1), policy_of(subject, 2)

    def intrude() -> None:
        hold_fails(subject, EngineBusyError, "a second refit during the first", other)
        expect(EngineBusyError, "close() during a refit", lambda: subject.close(subject.refitter()))

    report, refused, is_waiting = _refit_meanwhile(subject, policy, 1, intrude)
    hold(not is_waiting, "a second refit waited for the first instead of being refused at once")
    refused.result()
    hold(report.version == before.version + 1, f"one refit changed version {before.version} to {report.version}")
    expected.hold_bytes(subject, "a refit during which another was tried")


@restoring
def check_requests_meet_no_half_written_policy(subject: Subject) -> None:
    """A request during a write is refused, or waits and is answered by the new policy."""
    expected = serve(subject, 1)
    policy = policy_of(subject, 1)
    serve(subject)
    _, request, is_waiting = _refit_meanwhile(subject, policy, len(policy) - 1, subject.generate)
    with suppress(EngineDirtyError):
        answer = request.result()
        hold(is_waiting, "a request was answered while a refit was writing the weights")
        hold(answer == expected.answers, "a request that waited for a refit was not answered by the new policy")
    hold(subject.num_unfinished() == 0, f"{subject.num_unfinished()} requests remain unfinished")
    expected.hold_bytes(subject, "a refit during which a request arrived")


def _refit_meanwhile(
    subject: Subject, policy: Policy, num_before: int, attempt: Callable[[], Any]
) -> tuple[RefitReport, Future[Any], bool]:
    """Refit to `policy`, and call `attempt` in another thread after `num_before` tensors.

    Return the report, the attempt, and whether it was still waiting after `OTHER_THREAD_S`.
    """
    with ThreadPoolExecutor(1) as pool:
        attempted, is_waiting = pool.submit(lambda: None), False

        def stream() -> Iterator[tuple[str, Tensor]]:
            nonlocal attempted, is_waiting
            for index, item in enumerate(policy.items()):
                if index == num_before:
                    attempted = pool.submit(attempt)
                    is_waiting = bool(wait([attempted], timeout=OTHER_THREAD_S).not_done)
                yield item

        report = refit(subject, stream())
    return report, attempted, is_waiting
