"""The keys that requests get in SGLang's radix cache. Real schedulers: `tests/sglang/test_server_stubbed_kernels.py`."""

from types import SimpleNamespace

import pytest
from fp8refit_sglang.apart import num_refits, queued, received, set_apart, stamp
from fp8refit_sglang.scheduler_driver import admit


def request(key=None):
    return SimpleNamespace(extra_key=key)


def scheduler(*waiting, compiling=()):
    return SimpleNamespace(
        waiting_queue=list(waiting),
        grammar_manager=SimpleNamespace(grammar_queue=list(compiling)),
        _fp8refit_is_held=True,
    )


def keys(requests):
    return [each.extra_key for each in requests]


def test_without_such_a_refit_requests_stay_as_they_are():
    here, come = scheduler(), [request(), request("a user's")]
    stamp(here, come)
    assert keys(come) == [None, "a user's"]


def test_requests_that_wait_and_those_that_come_get_another_key_each_time():
    here = scheduler(request(), request("a user's"), compiling=[request()])
    set_apart(here)
    first, come = keys(queued(here)), request()
    stamp(here, [come])
    assert come.extra_key == first[0] == first[2] != first[1]
    assert "a user's" in first[1]
    set_apart(here)
    second = keys(queued(here))
    assert not set(first) & set(second)
    assert num_refits(here) == 2


@pytest.mark.parametrize("num_before", [0, 1])
def test_what_sglang_adds_to_a_key_stays_at_its_end(num_before):
    here = scheduler()
    if num_before:
        set_apart(here)
    waiting, later = request("a user's"), request("a user's")
    stamp(here, [waiting])
    waiting.extra_key += " and an adapter's"
    here.waiting_queue.append(waiting)
    set_apart(here)
    stamp(here, [later])
    later.extra_key += " and an adapter's"
    assert waiting.extra_key == later.extra_key
    assert later.extra_key.endswith("a user's and an adapter's")


def test_each_request_of_a_batch_gets_its_key():
    here, batch = scheduler(), [request(), request()]
    set_apart(here)
    stamp(here, received([batch, request(), SimpleNamespace(of="another kind")]))
    assert None not in keys(batch)


def test_a_request_that_came_with_a_refit_and_after_it_does_not_keep_the_key_from_before():
    here, late = scheduler(), request()
    set_apart(here)

    def receive(it, requests):
        set_apart(it)  # as the first of them asks for
        it.waiting_queue += requests

    admit(receive, here, [late])
    after = request()
    stamp(here, [after])
    assert late.extra_key == after.extra_key
