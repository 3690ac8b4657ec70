"""SGLang engines updated from within their schedulers, with stubbed kernels. `updates.py` does it."""

import pytest

from tests.updating import FAULTS, KINDS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]

PLACES = [f"{fault} {place}" for fault in FAULTS for place in range(4)]


@pytest.fixture(scope="module", params=[("qwen3", 1), ("qwen2_wide", 2)], ids=["one-rank", "two-ranks"])
def found(request, run_engine):
    family, num_ranks = request.param
    return run_engine("updates", family=family, num_ranks=num_ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_of_every_kind_give_the_bytes_and_outputs_of_a_refit(kind, found):
    assert found["differ"]
    assert all("version" in one for one in found["kinds"][kind]["updated"]), found["kinds"][kind]
    assert found["kinds"][kind]["same"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_answered_from_a_cache_of_the_policy_before(kind, found):
    assert found["kinds"][kind]["num_cached"] == [0, 0]


def test_the_network_alone_is_enough_to_find_its_engine(found):
    assert all("version" in one for one in found["model"]["updated"]), found["model"]
    assert found["model"]["same"]


@pytest.mark.parametrize("fault", PLACES)
def test_a_fault_in_any_bucket_serves_nothing_until_it_is_healed(fault, found):
    one = found["faults"][fault]
    assert all("error" in each for each in one["updated"]), one
    assert one["dirty"] == [True] * len(one["dirty"])
    assert one["generate"]["error"] == "HTTPException"
    assert one["generate"]["seconds"] < 1
    assert one["num_unfinished"] == 0
    assert all("version" in each for each in one["healed"]), one
    assert one["same"]


def test_a_refit_heals_what_an_update_left(found):
    assert found["healed by a refit"]


def test_a_cache_that_stays_stops_an_update_before_anything_is_written(found):
    assert [one["error"] for one in found["kept"]] == ["CacheFlushError"] * len(found["kept"])
    assert found["kept same"]


def test_verify_tells_what_differs_and_changes_nothing(found):
    assert found["verified"]["same"]
    assert found["verified"]["num_other"] > found["verified"]["num"] // 2
    assert found["untouched"]
