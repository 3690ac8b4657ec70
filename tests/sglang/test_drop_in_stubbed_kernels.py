"""SGLang's own calls that load weights, with the drop-in and stubbed kernels. `drop_ins.py` does it."""

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]

WAYS = ("from tensor", "tensor by tensor", "stages", "from distributed", "from disk")
PLACES = [
    f"{way}: {fault} {place}"
    for way in ("from tensor", "from disk")
    for fault in ("nan", "missing")
    for place in range(4)
]


@pytest.fixture(scope="module", params=[("qwen3", 1), ("qwen2_wide", 2)], ids=["one-rank", "two-ranks"])
def found(request, run_engine):
    family, num_ranks = request.param
    return run_engine("drop-in", family=family, num_ranks=num_ranks)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_trainer_loads_is_a_refit(way, found):
    one = found["ways"][way]
    assert found["differ"]
    assert all(answer["success"] for answer in one["loaded"]), one
    assert one["same"]
    assert [report["version"] for report in one["reports"]] == [3 + WAYS.index(way)] * len(one["reports"])


def test_no_live_tensor_moves(found):
    assert found["placed"]


@pytest.mark.parametrize("fault", PLACES)
def test_a_fault_in_any_bucket_is_answered_and_serves_nothing_until_it_is_healed(fault, found):
    one = found["faults"][fault]
    if found["has_sessions"] or "from tensor: missing" not in fault:  # known when a policy's first tensor comes again
        assert not one["loaded"][-1]["success"], one
    assert one["dirty"] == [True] * len(one["dirty"])
    assert one["generate"]["error"] == "HTTPException"
    assert one["num_unfinished"] == 0
    assert all(answer["success"] for answer in one["healed"]), one
    assert one["same"]


def test_all_that_was_wrapped_is_given_back(found):
    for there, removed in zip(found["traces"], found["removed"], strict=True):
        assert "network.load_weights" in there
        assert any(name.startswith("loader.") for name in there)
        assert [name for name in removed if not name.startswith("updates.")] == []


@pytest.fixture(scope="module")
def going_on(run_engine):
    return run_engine("drop-in going on", family="qwen3")


def test_a_request_that_was_paused_in_place_does_not_go_on_with_half_a_policy(going_on):
    assert not going_on["failed"]["success"]
    ((status, said),) = going_on["failed"]["running"]
    if status == 503:
        assert "refuses requests" in str(said), said
    else:  # up to 0.5.15 it does not say why
        assert said["meta_info"]["finish_reason"]["type"] == "abort", said
    assert going_on["healed"]["success"], going_on["healed"]


def test_a_request_that_a_trainer_pauses_in_place_shares_its_cache_with_no_later_one(going_on):
    found = going_on
    assert found["refitted"]["success"], found["refitted"]
    assert found["length"] == 200
    assert found["num_cached"] == found["num_cached_alone"]
    assert found["later"] == found["alone"]


def test_without_the_drop_in_nothing_is_touched_and_the_same_calls_do_not_refit(run_engine):
    off = run_engine("drop-in off", family="qwen3", num_ranks=1)
    assert off["traces"] == [[]]
    assert not off["same"]
