"""Families beside those of `test_refit.py`, each refitted and against a fresh engine of its own. On the CPU: `conftest.py`.

What is not as in Llama: Phi-3 and GLM-4 keep fused tensors in their checkpoints; Gemma, Granite and Cohere are tied without
an LM head in the engine or scale what others do not; vLLM runs OLMo-2 and StarCoder2 as transformers' models, whose names its
own mapping changes. Under two ranks: GLM-4 and Phi-3 in `test_layouts.py`.
"""

from pathlib import Path

import pytest

from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.live.layout import EngineLayout
from tests.tiny_models import save_model

pytestmark = pytest.mark.vllm

CASES = [
    ("phi3", "ue8m0"),
    ("glm4", "fp32"),
    ("gemma2", "ue8m0"),
    ("gemma3", "fp32"),
    ("granite", "fp32"),
    ("cohere", "ue8m0"),
    ("olmo2", "fp32"),
    ("starcoder2", "fp32"),
]
NAMES = [f"{family}-{kernel}" for family, kernel in CASES]
TIED = ["cohere", "gemma2", "gemma3", "granite", "starcoder2"]
every_family = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    for family, _ in CASES:
        save_model(family, 2, folder / f"{family}-bf16")
    return folder


@pytest.fixture(scope="module")
def refitted(run_engine, work):
    return run_engine("refit", cases=CASES, work=work)


@pytest.fixture(scope="module")
def fresh(run_engine, work: Path, refitted):
    for name, (family, _) in zip(NAMES, CASES, strict=True):
        layout = EngineLayout.model_validate(refitted[name]["layout"])
        quantize_checkpoint(work / f"{family}-bf16", work / name, like=layout)
    return run_engine("fresh", cases=CASES, work=work)


@every_family
def test_every_parameter_and_buffer_equals_that_of_a_fresh_engine(name, refitted, fresh):
    assert fresh[name]["live"]
    for found in ("live", "live_without_ignored", "live_renamed"):
        assert refitted[name][found] == fresh[name]["live"]


@every_family
def test_every_parameter_and_buffer_is_what_the_public_quantizer_gives(name, refitted):
    assert refitted[name]["wrong"] == []


@every_family
def test_tokens_and_log_probabilities_equal_those_of_a_fresh_engine(name, refitted, fresh):
    assert refitted[name]["generated"] == fresh[name]["generated"]
    assert refitted[name]["generated"]["outputs"] != refitted[name]["before"]["outputs"]


@every_family
def test_every_matrix_of_every_layer_is_quantized(name, refitted):
    quantized = [slot for slot in refitted[name]["layout"]["slots"] if slot["scale_format"] is not None]
    num_matrices = 6 if name.startswith("starcoder2") else 7
    assert len({(slot["name"], *slot["offset"]) for slot in quantized}) == len(quantized) == 2 * num_matrices


@every_family
def test_the_lm_head_of_a_tied_model_may_be_sent_or_not(name, refitted):
    is_tied = name.split("-")[0] in TIED
    assert refitted[name]["ignored"] == (["lm_head.weight"] if is_tied else [])
    assert refitted[name]["layout"]["aliases"].get("lm_head.weight") == (
        "model.embed_tokens.weight" if is_tied else None
    )


def test_slots_of_one_fused_tensor_are_boxes_of_it(refitted):
    slots = refitted["phi3-ue8m0"]["layout"]["slots"]
    qkv = [slot for slot in slots if slot["name"] == "model.layers.1.self_attn.qkv_proj.weight"]
    assert [(slot["full_shape"], slot["offset"], slot["shape"]) for slot in qkv] == [
        ([768, 256], [start, 0], [256, 256]) for start in (0, 256, 512)
    ]


def test_other_names_that_a_models_own_mapping_takes_fit_too(refitted):
    found = refitted["olmo2-fp32"]
    assert found["layout"]["aliases"]["layers.0.mlp.up_proj.weight"] == "model.layers.0.mlp.up_proj.weight"
    assert found["renamed"] == 2 * 11 + 2
