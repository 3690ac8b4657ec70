"""One live vLLM engine that is written in several ways at once.

On the CPU, with the tests' own FP8 product: `conftest.py` says what that does not claim. All tests read what one process
found. What else may happen to a live engine between two refits, `test_conformance.py` checks.
"""

import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def live(run_engine, tmp_path_factory):
    return run_engine("live", work=tmp_path_factory.mktemp("live"))


@pytest.mark.parametrize("name", ["writers", "threads"])
def test_the_next_refit_gives_the_same_bytes_and_outputs_as_before(name, live):
    assert live[name]["healed"]


def test_of_two_writers_by_different_ways_the_second_is_refused(live):
    for way, found in live["writers"].items():
        if way != "healed":
            assert found == {"refused": ["EngineBusyError"], "wrong": [], "serves": True}, way


def test_an_llm_and_its_worker_in_two_threads_never_mix_their_policies(live):
    found = live["threads"]
    assert found["wrong"] == []
    assert {error for errors in found["errors"] for error in errors} <= {"EngineBusyError"}
    assert all(len(errors) < 2 for errors in found["errors"])
