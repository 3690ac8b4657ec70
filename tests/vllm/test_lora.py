"""vLLM engines that serve LoRA adapters. A refit reaches the base weights under the wrappers, and no adapter; one of an adapter
reaches it, and nothing else. Fresh engines load the same from files. On the CPU.
"""

from types import SimpleNamespace

import pytest

from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.live.layout import EngineLayout
from tests.engines.adapter_tests import *  # noqa: F403 - tests
from tests.tiny_models import save_model
from tests.vllm.processes import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

FAMILIES = {"in one process": "qwen2", "tensor parallel": "qwen2_wide", "asynchronous": "qwen2"}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    save_model("qwen2", 2, folder / "bf16")
    return folder


@pytest.fixture(scope="module")
def refitted(run_engine, work):
    return run_engine("lora", work=work)


@pytest.fixture(scope="module")
def fresh(run_engine, work, refitted):
    quantize_checkpoint(work / "bf16", work / "fp8", like=EngineLayout.model_validate(refitted["layout"]))
    return run_engine("fresh lora", work=work)


def test_base_weights_under_the_wrappers_equal_those_of_a_fresh_engine(refitted, fresh):
    assert "model.layers.0.self_attn.qkv_proj.base_layer.weight_scale_inv" in fresh["live"]
    assert refitted["live"] == fresh["live"]


@pytest.mark.parametrize("said", ["generated", "adapted"])
def test_tokens_and_log_probabilities_equal_those_of_a_fresh_engine(said, refitted, fresh):
    assert refitted[said] == fresh[said]
    assert refitted["adapted"] != refitted["generated"]["outputs"]
    assert refitted["adapted"] != refitted["before"]


def test_adapters_are_left_as_they_are(refitted, fresh):
    assert len(refitted["adapter"]) > 8
    assert refitted["adapter"] == refitted["adapter_before"] == fresh["adapter"]
    assert refitted["kept"] == []


def test_a_refitted_adapter_that_loses_its_place_in_host_memory_comes_back_as_it_was_refitted(refitted):
    assert refitted["adapter_again"] == refitted["adapter_refitted"] != refitted["adapted"]
    assert refitted["adapter_removed"] == refitted["adapted"]


def test_slots_have_the_checkpoints_names(refitted):
    names = [slot["name"] for slot in refitted["layout"]["slots"]]
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not any("base_layer" in name or "lora" in name for name in names)


@pytest.fixture(scope="module", params=FAMILIES)
def runs(request, starter, tmp_path_factory):
    """An engine whose adapter was refitted, and a fresh one."""
    import vllm

    layout, family = request.param, FAMILIES[request.param]
    if layout == "tensor parallel" and vllm.__version__.startswith("0.22"):
        pytest.skip(
            "with two ranks on a CPU, vLLM 0.22 itself fails at the first request with an adapter (bgmv_expand_slice)"
        )
    folder = tmp_path_factory.mktemp("adapters")
    save_model(family, 1, folder / f"{family}-bf16")
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(layout != "in one process"))}

    def run(scenario, **arguments):
        asked = {"layout": layout, "family": family, "work": folder} | arguments
        outcome = run_scenario(starter, scenario, asked, folder, timeout_s=110, environment=environment)
        return outcome.drivers[0]

    found = run("adapters")
    like = EngineLayout.model_validate(found["layout"])
    quantize_checkpoint(folder / f"{family}-bf16", folder / "fp8", like=like)
    return SimpleNamespace(refitted=found, fresh=run("fresh adapters", fp8=folder / "fp8"))


def test_its_config_says_by_what_a_matrix_is_multiplied(runs):
    assert runs.refitted["other"] == runs.fresh["other"] != runs.fresh["new"]


def test_it_may_be_broadcast_and_weights_are_verified_without_it(runs):
    assert runs.refitted["broadcast"] == runs.fresh["new"]
    assert runs.refitted["verified"]


def test_an_adapter_that_lost_its_slot_is_refused_and_comes_back_as_it_was_refitted(runs):
    found, fresh = runs.refitted["evicted"], runs.fresh["new"]["said"]
    assert found["seats"] == [[3, 2]] * len(found["seats"])
    assert found["refused"]["error"] == "UnsupportedEngineError" and "add it again" in found["refused"]["message"]
    assert found["three"] == runs.fresh["new_three"]
    assert found["one"] == fresh["one"]


@pytest.mark.parametrize(("when", "is_dirty"), [("prepared", False), ("written", True)])
def test_no_adapter_is_written_where_another_one_has_come(when, is_dirty, runs):
    found, fresh = runs.refitted["evicted"][when], runs.fresh["new"]
    assert found["error"]["error"] == "LiveTensorMovedError" and found["dirty"] == is_dirty
    assert found["said"] == [fresh["said"]["one"], fresh["said"]["two"], runs.fresh["new_three"]]


@pytest.mark.parametrize("when", ["prepared", "written"])
def test_a_refit_of_weights_goes_on_while_adapters_move(when, runs):
    fresh = runs.fresh["new"]["said"]
    assert runs.refitted["evicted"][when]["said_after_weights"] == [fresh["one"], fresh["two"], runs.fresh["new_three"]]


def test_adapters_come_back_from_a_deep_sleep_as_they_were(runs):
    found, fresh = runs.refitted["slept"], runs.fresh["new"]
    assert (
        found["adapter"]["error"] == "UnsupportedEngineError"
        and "refit the weights first" in found["adapter"]["message"]
    )
    assert found["said"] == [fresh["said"]["one"], fresh["said"]["two"], runs.fresh["new_three"]]


def test_a_refit_of_weights_keeps_it_and_one_loaded_anew_is_seen(runs):
    found, new = runs.refitted["base"], runs.fresh["new"]["said"]["one"]
    assert found["said"] == found["said_after"] == found["refitted"] == new
    assert found["kept"] == []
    assert found["removed"]["error"] == "UnsupportedEngineError"
    assert found["again"] == runs.refitted["before"]["said"]["one"] != new
