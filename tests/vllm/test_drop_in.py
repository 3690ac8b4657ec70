"""vLLM's own calls that load weights, with the drop-in: what a trainer calls, in every layout. `drop_ins.py` does it."""

import re
from pathlib import Path

import pytest

from tests.tiny_models import save_model
from tests.updating import FAULTS
from tests.vllm.processes import run_scenario, vllm_version

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

CASES = {
    "in process": ("llama_tied", 1, False),
    "tensor parallel": ("qwen2_wide", 1, True),
    "external launcher": ("qwen2_wide", 2, False),
    "pipeline parallel": ("llama_tied", 1, True),
    "expert parallel": ("qwen3_moe", 1, True),
}
"""Family, number of drivers, and whether the engine core has a process of its own."""
WAYS = ("tensor by tensor", "buckets", "generators", "stages", "layerwise", "reload_weights", "weight transfer")
PLACES = [
    f"{way}: {fault} {place}"
    for way in WAYS
    if way in ("tensor by tensor", "layerwise")
    for fault in FAULTS
    for place in range(4)
]
ON = {"FP8REFIT_DROP_IN": "1", "FP8REFIT_TEST_START_METHOD": "fork"}


@pytest.fixture(scope="module", params=CASES)
def drivers(request, starter, tmp_path_factory):
    family, num_drivers, has_own_core = CASES[request.param]
    folder = tmp_path_factory.mktemp("drop-in")
    save_model(family, 1, folder / "bf16")
    (folder / "ids.json").write_text(str([[(7 * i + 3 * j) % 256 for j in range(16)] for i in range(4)]))
    method = {"FP8REFIT_TEST_START_METHOD": "spawn" if request.param == "tensor parallel" else "fork"}
    calibration = {"FP8REFIT_CALIBRATION": str(folder / "ids.json")} if request.param == "tensor parallel" else {}
    outcome = run_scenario(
        starter,
        "drop-in",
        {"layout": request.param, "family": family, "model": folder / "bf16"},
        folder,
        timeout_s=260,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(has_own_core)), **ON, **method, **calibration},
        num_drivers=num_drivers,
    )
    assert outcome.left == []
    return outcome.drivers


@pytest.mark.parametrize("way", WAYS)
def test_what_a_trainer_loads_is_a_refit(way, drivers):
    for driver in drivers:
        found = driver["ways"][way]
        assert [one.get("version") for one in found["loaded"]] == [3 + WAYS.index(way)] * len(found["loaded"]), found
        assert driver["differ"]
        assert found["same"]


def test_kv_scales_are_calibrated_where_ids_are_given(drivers):
    for driver in drivers:
        for found in driver["ways"].values():
            kv = [one["kv"] for one in found["loaded"]]
            assert all(one["num_tokens"] == 64 for one in kv) if driver["layout"] == "tensor parallel" else not any(kv)


def test_no_live_tensor_moves(drivers):
    assert all(driver["placed"] for driver in drivers)


@pytest.mark.parametrize("fault", PLACES)
def test_a_fault_in_any_bucket_serves_nothing_until_it_is_healed(fault, drivers):
    for driver in drivers:
        found = driver["faults"][fault]
        if "missing" not in fault or "layerwise" in fault:  # or known when the first tensor of a policy comes again
            assert all("error" in one for one in found["loaded"]), found
        if "layerwise" not in fault and fault.endswith("raise 0"):
            assert found["dirty"] == [False] * len(found["dirty"])  # nothing came
        else:
            assert found["dirty"] == [True] * len(found["dirty"])
            assert found["generate"]["error"] == "EngineDirtyError"
        if "missing" in fault and "layerwise" not in fault:
            assert re.search(r"is whole with \d+ more: model\.", found["generate"]["message"])
        assert all("version" in one for one in found["healed"]), found
        assert found["same"]


def test_a_policy_that_broke_off_is_not_completed_by_the_next(drivers):
    for driver in drivers:
        found = driver["cut"]
        assert found["dirty"] == [True] * len(found["dirty"])
        assert all("version" in one for one in found["loaded"]), found
        assert found["same"]
        assert driver["healed by a refit"]


@pytest.mark.parametrize("way", ["copied", "copied in part", "written to", "pulled"])
def test_what_writes_past_every_loader_is_refused_by_name_until_it_is_healed(way, drivers):
    for driver in drivers:
        found = driver["past"][way]
        what = "model.norm.weight" if way == "pulled" else "observer.observe wrote live weights past every loader"
        assert what in found["raised"]["message"], found["raised"]
        assert found["dirty"] == [True] * len(found["dirty"])
        assert found["generate"]["error"] == "EngineDirtyError"
        assert all("version" in one for one in found["healed"]), found
        assert found["same"]


def test_what_vllms_own_call_writes_to_live_parameters_is_served(drivers):
    for driver in drivers:
        found = driver["past"]["named"]
        assert found["raised"] is None
        assert found["served"] == (
            [2] if driver["layout"] != "tensor parallel" else []
        )  # its KV scales are no parameters
        assert found["same"]


def test_after_a_reload_that_failed_tensors_are_taken_one_by_one(drivers):
    for driver in drivers:
        found = driver["reload"]
        assert all("error" in one for one in found["failed"]), found
        assert all("version" in one for one in found["loaded"]), found
        assert found["same"]


def test_all_that_was_wrapped_is_given_back(drivers):
    for driver in drivers:
        for there, removed in zip(driver["traces"], driver["removed"], strict=True):
            assert removed == []
            assert {"network.load_weights", "worker.fp8refit_last_report", "runner.reload_weights"} <= set(there)
            assert "vllm.model_executor.model_loader.reload.initialize_layerwise_reload" in there
            assert (
                len([name for name in there if name.endswith(".finalize_layerwise_reload")]) > 2
            )  # wherever it is imported
            assert "vllm.model_executor.model_loader.utils.process_weights_after_loading" in there


@pytest.fixture(scope="module")
def run_boot(starter, tmp_path_factory):
    """Run a scenario with two policies."""
    work = tmp_path_factory.mktemp("boots")
    for seed in (1, 2):
        save_model("qwen3", seed, work / f"policy-{seed}")

    def run(name, environment, **arguments):
        asked = {"work": work, **arguments}
        return run_scenario(starter, name, asked, work, timeout_s=120, environment=environment).drivers[0]

    return run


@pytest.fixture(scope="module", params=["fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "mxfp8"])
def boots(request, run_boot):
    """An engine that is quantized by the environment and loaded into, and a fresh one."""
    if request.param == "fp8_per_channel" and vllm_version() < (0, 24):
        pytest.skip("vLLM has it since 0.24")
    if request.param == "mxfp8" and vllm_version() < (0, 32):
        pytest.skip("vLLM emulates it in rows since 0.32")
    quantized = {"FP8REFIT_QUANTIZATION": request.param}
    return {
        "loaded": run_boot("drop-in boot", ON | quantized, family="qwen3"),
        "fresh": run_boot("drop-in fresh", {}, quantization=request.param),
    }


def test_what_was_loaded_is_what_a_fresh_engine_boots(boots):
    loaded, fresh = boots["loaded"], boots["fresh"]
    assert loaded["loaded"]["version"] == 1
    assert loaded["live"] == fresh["live"]
    assert loaded["outputs"] == fresh["outputs"]
    assert loaded["placed"]


def test_patches_of_values_are_refused_by_name_and_write_nothing(boots):
    loaded = boots["loaded"]
    assert loaded["same"]
    if loaded["patched"] is not None:  # since 0.29
        assert loaded["patched"]["error"] == "UnsupportedEngineError"
        assert "patches of single tensors or values" in loaded["patched"]["message"]


def test_what_an_engine_reloads_by_itself_is_named(boots):
    report = boots["loaded"]["reloaded"]
    assert (report["version"], Path(report["source"]).name) == (2, "policy-1")


def test_a_second_end_is_an_error(boots):
    assert "a second time" in boots["loaded"]["end"]["message"]


def test_without_the_drop_in_nothing_is_touched_and_the_same_calls_do_not_refit(boots):
    assert boots["fresh"]["traces"] == []
    assert {"network.load_weights", "EngineArgs.create_engine_config"} <= set(boots["loaded"]["traces"])
    assert boots["loaded"]["removed"] == []
    assert boots["loaded"]["control"]["error"] in (
        "AttributeError",
        "AssertionError",
    )  # live parameters have no loaders


def test_engines_that_cannot_be_dropped_into_do_not_boot_and_others_are_left_alone(run_boot):
    found = run_boot("drop-in refused", ON)
    assert "cannot be refitted" in found["repacking"]["message"]
    assert found["bfloat16"] == []
    assert found["option"] == []


def test_a_request_that_a_trainer_freezes_goes_on_and_shares_its_cache_with_no_later_one(starter, tmp_path):
    save_model("qwen3", 1, tmp_path / "bf16")
    found = run_scenario(
        starter,
        "drop-in going on",
        {"family": "qwen3", "model": tmp_path / "bf16"},
        tmp_path,
        timeout_s=100,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "FP8REFIT_IN_FLIGHT": "continue", **ON},
    ).drivers[0]
    assert [one["version"] for one in found["loaded"]] == [2]
    assert found["length"] == 80
    assert [each["said"] for each in found["later"]] == [each["said"] for each in found["alone"]]
    assert [each["num_cached"] for each in found["later"]] == [0, 128]
