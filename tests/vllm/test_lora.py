"""vLLM engines that serve LoRA adapters: a refit reaches the base weights under the wrappers, and no adapter. On the CPU."""

import pytest

from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.live.layout import EngineLayout
from tests.tiny_models import save_model

pytestmark = pytest.mark.vllm


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


def test_slots_have_the_checkpoints_names(refitted):
    names = [slot["name"] for slot in refitted["layout"]["slots"]]
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not any("base_layer" in name for name in names)
