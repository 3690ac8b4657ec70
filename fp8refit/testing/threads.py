"""Checks that another thread can neither start a second refit nor meet a half-written policy."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from torch import Tensor

from fp8refit.errors import EngineBusyError, EngineDirtyError
from fp8refit.testing.policies import policy_of
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

    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(lambda: None)
        waited = False

        def stream() -> Iterator[tuple[str, Tensor]]:
            nonlocal refused, waited
            for index, item in enumerate(policy.items()):
                if index == 1:
                    refused = pool.submit(intrude)
                    waited = bool(wait([refused], timeout=OTHER_THREAD_S).not_done)
                yield item

        report = refit(subject, stream())
    hold(not waited, "a second refit waited for the first instead of being refused at once")
    refused.result()
    hold(report.version == before.version + 1, f"one refit changed version {before.version} to {report.version}")
    expected.hold_bytes(subject, "a refit during which another was tried")


@restoring
def check_requests_meet_no_half_written_policy(subject: Subject) -> None:
    """A request during a write is refused, or waits and is answered by the new policy."""
    expected = serve(subject, 1)
    policy = policy_of(subject, 1)
    serve(subject)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(lambda: None)
        answered_meanwhile = False

        def stream() -> Iterator[tuple[str, Tensor]]:
            nonlocal request, answered_meanwhile
            for index, item in enumerate(policy.items()):
                if index == len(policy) - 1:
                    request = pool.submit(subject.generate)
                    answered_meanwhile = bool(wait([request], timeout=OTHER_THREAD_S).done)
                yield item

        refit(subject, stream())
    with suppress(EngineDirtyError):
        answer: Any = request.result()
        hold(not answered_meanwhile, "a request was answered while a refit was writing the weights")
        hold(answer == expected.answers, "a request that waited for a refit was not answered by the new policy")
    hold(subject.num_unfinished() == 0, f"{subject.num_unfinished()} requests remain unfinished")
    expected.hold_bytes(subject, "a refit during which a request arrived")
