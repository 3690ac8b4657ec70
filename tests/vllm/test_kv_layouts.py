"""Calibration of FP8 KV caches in other processes: two ranks that agree, and an `AsyncLLM` that answers meanwhile.

On the CPU: `conftest.py` says what that does not claim. Tests read what one engine of each layout found (`kv_layouts.py`).
"""

import pytest

from tests.outliers import BATCH, calm_policy, largest_keys_and_values, with_outliers
from tests.vllm.layout_runs import CASES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(118)]

MARGIN = 1.05
LAYOUTS = {"tensor parallel": 2, "asynchronous": 1}
ATTEMPTS = {
    "tensor parallel": [
        "kv: calibration",
        "kv: each rank for itself",
        "kv: rank fault",
    ],
    "asynchronous": ["kv: calibration", "kv: in flight", "kv: alone in flight"],
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module")
def lived(layout_runs):
    """What the driver of a layout's engine found."""
    return lambda layout: layout_runs.lived(layout).drivers[0]


@pytest.fixture(scope="module")
def one_rank_s():
    """What one rank would see, by layout."""
    found = {}
    for layout in LAYOUTS:
        family, kernel = CASES[layout].family, CASES[layout].kernel
        policy = with_outliers(calm_policy(family, 2))
        found[layout] = largest_keys_and_values(family, policy, BATCH, scale_format=kernel)
    return found


def copies_of(scales: dict[str, float]) -> dict[str, float]:
    """What every copy of these scales has to be in a worker."""
    copies = {}
    for name, scale in scales.items():
        attention, _, leaf = name.rpartition(".")
        copies |= {f"{attention}.attn._{leaf}{kind}": scale for kind in ("", "_float", "_cpu")}
    return copies


def chosen(copies: dict[str, float]) -> dict[str, float]:
    """The copies of scales of keys and values."""
    return {name: scale for name, scale in copies.items() if "._k_" in name or "._v_" in name}


@pytest.mark.parametrize(
    ("layout", "attempt"), [(layout, attempt) for layout, attempts in ATTEMPTS.items() for attempt in attempts]
)
def test_the_next_refit_gives_the_same_bytes_and_outputs_as_before(layout, attempt, lived):
    assert lived(layout)[attempt]["healed"]
    assert lived(layout)[attempt]["seconds"] < 20


@every_layout
def test_every_rank_has_the_scales_that_one_rank_would_have(layout, lived, one_rank_s):
    found = lived(layout)["kv: calibration"]
    scales = found["report"]["scales"]
    assert {name: scale * 448 / MARGIN for name, scale in scales.items()} == pytest.approx(one_rank_s[layout], rel=0.02)
    assert found["ranks"] == [scales] * LAYOUTS[layout]
    assert list(map(chosen, found["copies"])) == [copies_of(scales)] * LAYOUTS[layout]


@every_layout
def test_scales_are_carried_over_on_every_rank(layout, lived):
    assert lived(layout)["kv: calibration"]["carried"]


@every_layout
def test_calibration_alone_gives_the_same_and_changes_nothing_else(layout, lived):
    found = lived(layout)["kv: calibration"]
    assert found["again"]["report"]["scales"] == found["report"]["scales"]
    assert found["again"]["copies"] == found["copies"]
    assert (found["again"]["version"], found["again"]["live"]) == (0, True)
    assert (found["moved"], found["traces"]) == (False, [])


def test_ranks_may_each_use_what_their_own_heads_showed(lived):
    found, largest = lived("tensor parallel")["kv: each rank for itself"], lived("tensor parallel")["kv: calibration"]
    ranks, scales = [chosen(copies) for copies in found["copies"]], copies_of(largest["report"]["scales"])
    assert ranks[0] != ranks[1]
    assert {name: max(rank[name] for rank in ranks) for name in scales} == scales
    assert all(0 < rank[name] <= scales[name] for rank in ranks for name in scales)


def test_the_report_has_each_rank_s_own_scales(lived):
    found = lived("tensor parallel")["kv: each rank for itself"]
    assert [copies_of(scales) for scales in found["ranks"]] == [chosen(copies) for copies in found["copies"]]


def test_a_rank_that_fails_after_its_pass_leaves_every_rank_dirty_with_its_old_scales(lived):
    found = lived("tensor parallel")["kv: rank fault"]
    assert found["armed"] == [False, True]
    assert found["refit"]["error"] == "RankFailedError"
    assert "rank 1: RuntimeError: injected" in found["refit"]["message"]
    assert (found["dirty"], found["changed"], found["scales_untouched"]) == (True, [True, True], True)


@pytest.mark.parametrize("entry", ["generate", "add_request", "calibrate"])
def test_a_dirty_engine_refuses_requests_and_calibration_within_a_second(entry, lived):
    found = lived("tensor parallel")["kv: rank fault"]
    refusal = (found["entries"] | {"calibrate": found["calibrate"]})[entry]
    assert refusal["error"] == "EngineDirtyError"
    assert refusal["seconds"] < 1


def test_kept_requests_go_on_over_a_cache_of_new_scales(lived):
    found, scales = lived("asynchronous")["kv: in flight"], lived("asynchronous")["kv: calibration"]["report"]["scales"]
    assert (found["stuck"], found["dirty"], found["refit"], found["num_interrupted"]) == (0, False, None, 2)
    assert [request["reason"] for request in found["running"]] == ["length"] * 2
    assert [len(request["tokens"]) for request in found["running"]] == [80] * 2
    assert found["late"]["versions"] in (None, [str(found["version"])])
    assert [chosen(copies) for copies in found["copies"]] == [copies_of(scales)]


def test_a_request_goes_on_through_a_calibration_alone_under_the_same_version(lived):
    found, scales = (
        lived("asynchronous")["kv: alone in flight"],
        lived("asynchronous")["kv: calibration"]["report"]["scales"],
    )
    assert found["was_running"]
    assert (found["running"]["reason"], len(found["running"]["tokens"])) == ("length", 80)
    assert found["running"]["versions"] in (None, [str(found["version"])])
    assert found["scales"] == scales
    assert [chosen(copies) for copies in found["copies"]] == [copies_of(scales)]
    assert (found["traces"], found["num_unfinished"]) == ([], 0)
