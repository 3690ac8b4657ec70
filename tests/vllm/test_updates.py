"""vLLM engines updated from within their workers: in one process, in several, with one driver per rank.

`updates.py` does it.
"""

import pytest

from tests.tiny_models import save_model
from tests.updating import FAULTS, KINDS
from tests.vllm.processes import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200)]

CASES = {
    "in process": ("qwen3", 1, False),
    "multi-process": ("qwen3", 1, True),
    "tensor parallel": ("qwen2_wide", 1, True),
    "core in process": ("qwen2_wide", 1, False),
    "external launcher": ("qwen2_wide", 2, False),
}
"""Family, number of drivers, and whether the engine core has a process of its own."""
CASE_RANKS = {"in process": 1, "multi-process": 1, "tensor parallel": 2, "core in process": 2, "external launcher": 2}
PLACES = [f"{fault} {place}" for fault in FAULTS for place in range(4)]


@pytest.fixture(scope="module", params=CASES)
def drivers(request, starter, tmp_path_factory):
    family, num_drivers, has_own_core = CASES[request.param]
    folder = tmp_path_factory.mktemp("updates")
    save_model(family, 1, folder / "bf16")
    outcome = run_scenario(
        starter,
        "updates",
        {"layout": request.param, "family": family, "model": folder / "bf16"},
        folder,
        timeout_s=180,
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(has_own_core)),
            "FP8REFIT_TEST_START_METHOD": "spawn" if request.param == "multi-process" else "fork",
        },
        num_drivers=num_drivers,
    )
    assert outcome.left == []
    return outcome.drivers


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_of_every_kind_give_the_bytes_and_outputs_of_a_refit(kind, drivers):
    for driver in drivers:
        found = driver["kinds"][kind]
        assert all("version" in one for one in found["updated"]), found
        assert driver["differ"]
        assert found["same"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_answered_from_a_cache_of_the_policy_before(kind, drivers):
    assert [driver["kinds"][kind]["num_cached"] for driver in drivers] == [0] * len(drivers)


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
        assert found["generate"]["error"] == "EngineDirtyError"
        assert found["generate"]["seconds"] < 1
        assert found["num_unfinished"] == 0
        assert all("version" in one for one in found["healed"]), found
        assert found["same"]


def test_a_refit_heals_what_an_update_left(drivers):
    assert all(driver["healed by a refit"] for driver in drivers)


def test_a_request_that_runs_while_an_update_comes_ends(drivers):
    assert [driver["running"]["num_done"] for driver in drivers] == [1] * len(drivers)


def test_what_is_frozen_is_kept_unless_a_sleep_has_thrown_it_away(drivers):
    for driver in drivers:
        found = driver["kept"]
        assert found["kept"]
        assert all(name.endswith("norm.weight") for name in found["kept"])
        assert found["same"]
        assert found["slept"]["error"] == "InvalidSourceError"
        assert sorted(line.split(":")[0] for line in found["slept"]["named"]) == sorted(found["kept"])
        assert found["untouched"]
        assert found["again"] == found["kept"]


def test_verify_tells_which_tensor_differs_on_which_rank_and_changes_nothing(drivers):
    for driver in drivers:
        found = driver["verified"]
        assert found["same"]
        assert found["num_other"] > found["num_tensors"] // 2
        assert found["untouched"]
    found = drivers[-1]["verified"]["found"]
    assert found == {"model.layers.1.mlp.down_proj.weight": [max(0, CASE_RANKS[drivers[0]["layout"]] - 1)]}
