"""vLLM engines with latent attention (MLA), refitted and fresh: bytes, absorbed copies among them, tokens, log-probabilities.

The absorbed copies are parameters of vLLM's, so they are in `live`. On the CPU vLLM dequantizes `kv_b_proj` by its scales; the
product with an identity matrix that it uses for that where DeepGEMM is supported does not run here.
"""

import pytest

from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.live.layout import EngineLayout
from tests.tiny_models import save_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

CASES = [("deepseek_v3", "ue8m0"), ("deepseek_v2", "fp32")]
NAMES = [f"{family}-{kernel}" for family, kernel in CASES]
SPLIT = ("deepseek_v3", "fp32")
"""Family and kernel of the engine of two ranks."""
ATTENTION = "model.layers.1.self_attn"
every_case = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def engines(refit_and_boot):
    """What refitted engines found, and fresh ones."""
    return refit_and_boot(CASES)


@pytest.fixture
def refitted(engines):
    return engines[0]


@pytest.fixture
def fresh(engines):
    return engines[1]


@pytest.fixture(scope="module")
def split(run_engine, tmp_path_factory):
    """What an engine of two ranks found through refits, and what a fresh one of its kind holds and says."""
    (family, kernel), work = SPLIT, tmp_path_factory.mktemp("latent")
    save_model(family, 2, work / f"{family}-bf16")
    asked = {"layout": "core in process", "family": family, "kernel": kernel, "work": work}
    found = run_engine("latent", **asked)
    layout = EngineLayout.model_validate(found["layout"])
    quantize_checkpoint(work / f"{family}-bf16", work / f"{family}-{kernel}", like=layout)
    return found, run_engine("fresh latent", **asked)


@every_case
def test_every_tensor_and_absorbed_copy_equals_that_of_a_fresh_engine(name, refitted, fresh):
    copies = {f"{ATTENTION}.mla_attn.mla_attn.{copy}" for copy in ("W_UK_T", "W_UV")}
    assert copies <= fresh[name]["live"].keys()
    assert refitted[name]["live"] == fresh[name]["live"]


@every_case
def test_every_tensor_and_absorbed_copy_is_what_the_public_quantizer_gives(name, refitted):
    assert refitted[name]["wrong"] == []


@every_case
def test_tokens_and_log_probabilities_equal_those_of_a_fresh_engine(name, refitted, fresh):
    assert refitted[name]["generated"] == fresh[name]["generated"]
    assert refitted[name]["generated"]["outputs"] != refitted[name]["before"]["outputs"]


@every_case
def test_scales_of_the_latent_cache_stay_as_a_boot_leaves_them(name, refitted, fresh):
    assert refitted[name]["kv_scales"] == fresh[name]["kv_scales"]


def test_fused_projections_are_known_by_their_parts(refitted):
    layout = refitted["deepseek_v3-ue8m0"]["layout"]
    slots = {slot["name"]: slot for slot in layout["slots"]}
    fused = [slots[f"{ATTENTION}.{part}.weight"] for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert [slot["shape"] for slot in fused] == [[128, 256], [576, 256]]
    assert {slot["module"] for slot in fused} == {f"{ATTENTION}.fused_qkv_a_proj"}
    assert layout["aliases"] == {}


def test_queries_of_full_rank_are_not_fused(refitted):
    slots = {slot["name"]: slot["module"] for slot in refitted["deepseek_v2-fp32"]["layout"]["slots"]}
    for part in ("q_proj", "kv_a_proj_with_mqa"):
        assert slots[f"{ATTENTION}.{part}.weight"] == f"{ATTENTION}.{part}"


def test_every_byte_of_two_ranks_equals_that_of_fresh_ones(split):
    found, fresh = split
    first, second = fresh["live"]
    assert first[f"{ATTENTION}.mla_attn.mla_attn.W_UV"] != second[f"{ATTENTION}.mla_attn.mla_attn.W_UV"]
    assert found["policies"]["rounds"][1]["live"] == [first, second]
    assert found["policies"]["rounds"][1]["outputs"] == fresh["outputs"]


def test_tensors_of_two_ranks_stay_in_place_and_a_policy_comes_back(split):
    policies = split[0]["policies"]
    assert policies["moved"] == [[], []]
    first, second, third = policies["rounds"]
    assert first["live"] == third["live"] != second["live"]


@pytest.fixture(scope="module")
def cache(run_engine, tmp_path_factory):
    """Engines whose latents are in FP8. What stores and reads them is the tests' own (`cpu_fp8_latent.py`)."""
    return run_engine("latent cache", family="deepseek_v3", work=tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("scales", ["ones", "sent"])
def test_an_engine_with_latents_in_fp8_holds_and_says_what_a_fresh_one_does_under_the_same_scales(scales, cache):
    """vLLM's own method for KV scales has given them to the fresh one."""
    refitted, fresh = cache[scales], cache["fresh"][scales]
    assert refitted["live"] == fresh["live"]
    assert refitted["copies"] == fresh["copies"]
    assert refitted["outputs"] == fresh["outputs"]


def test_scales_of_latents_are_given_with_weights_and_sent_among_them(cache):
    ones, given, sent = (cache[kind]["copies"] for kind in ("ones", "given", "sent"))
    prefix = "model.layers.1.self_attn.mla_attn.mla_attn"
    copies = [f"{prefix}._{kind}_scale{form}" for kind in "kv" for form in ("", "_float", "_cpu")]
    assert [{found[copy] for copy in copies} for found in (ones, given, sent)] == [
        {1.0},
        {1.0},
        {cache["reported"]["model.layers.1.self_attn.k_scale"]},
    ]
    assert given[f"{prefix.replace('1', '0')}._k_scale"] == 0.5
    assert sent[f"{prefix}._q_scale"] == 1.0
    assert cache["ones"]["outputs"] != cache["sent"]["outputs"]


def test_scales_of_latents_stay_without_new_ones_and_after_a_refit_that_failed(cache):
    assert cache["kept"] == cache["sent"]["copies"]
    assert cache["broken"]["error"] == "NonFiniteError"
    assert cache["healed"] == cache["sent"]


def test_scales_of_latents_are_not_measured(cache):
    assert cache["measured"]["error"] == "UnsupportedEngineError"
    assert "is MLAAttention" in cache["measured"]["message"]
    assert "Give the scales instead" in cache["measured"]["message"]
