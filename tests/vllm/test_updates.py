"""vLLM engines updated from within their workers: in one process, in several, with one driver per rank.

`updates.py` does it.
"""

import pytest

from tests.engines.update_tests import *  # noqa: F403 - tests
from tests.tiny_models import save_model
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


def test_a_bit_that_flipped_is_told_with_its_tensor_and_rank(drivers):
    last = max(0, CASE_RANKS[drivers[0]["layout"]] - 1)
    assert drivers[-1]["flipped"] == {"model.layers.1.mlp.down_proj.weight": [last]}
