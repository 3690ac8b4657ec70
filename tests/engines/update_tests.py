"""What must come of `updates.py`. The tests of an engine import these, and have a fixture `drivers`: what each driver found."""

import pytest

from tests.engines.updates import PLACES
from tests.updating import KINDS

REFUSALS = ("EngineDirtyError", "HTTPException")
"""Ours, and that of SGLang's own that carries it."""


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_of_every_kind_give_the_bytes_and_outputs_of_a_refit(kind, drivers):
    for driver in drivers:
        found = driver["kinds"][kind]
        assert all("version" in one for one in found["updated"]), found
        assert driver["differ"]
        assert found["same"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_answered_from_a_cache_of_the_policy_before(kind, drivers):
    assert not any(sum(driver["kinds"][kind]["num_cached"]) for driver in drivers)


def test_the_network_alone_is_enough_to_find_its_engine(drivers):
    for driver in drivers:
        assert all("version" in one for one in driver["model"]["updated"]), driver["model"]
        assert driver["model"]["same"]


@pytest.mark.parametrize("fault", PLACES)
def test_a_fault_in_any_bucket_serves_nothing_until_it_is_healed(fault, drivers):
    for driver in drivers:
        found = driver["faults"][fault]
        assert all("error" in one for one in found["updated"]), found
        assert found["dirty"] == [True] * len(found["dirty"])
        assert found["generate"]["error"] in REFUSALS
        assert found["generate"]["seconds"] < 1
        assert found["num_unfinished"] == 0
        assert all("version" in one for one in found["healed"]), found
        assert found["same"]


def test_a_refit_heals_what_an_update_left(drivers):
    assert all(driver["healed by a refit"] for driver in drivers)


def test_verify_tells_what_differs_and_changes_nothing(drivers):
    for driver in drivers:
        found = driver["verified"]
        assert found["same"]
        assert found["num_other"] > found["num_tensors"] // 2
        assert found["untouched"]
