"""SGLang itself on the CPU with stubbed kernels, before any refit: what the other tests rely on."""

import pytest

from tests.sglang.conftest import FRESH
from tests.vllm.processes import run_python

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

LINEARS = {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")}
FUSED_LINEARS = {
    f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")
}
every_engine = pytest.mark.parametrize("name", [f"{family}-{num_ranks}" for family, num_ranks in FRESH])


@every_engine
def test_every_rank_says_what_it_holds(name, fresh):
    num_ranks = int(name[-1])
    assert len(fresh[name]["live"]) == num_ranks
    assert all(len(live) > 20 for live in fresh[name]["live"])
    assert [live.keys() for live in fresh[name]["live"]] == [places.keys() for places in fresh[name]["places"]]


def test_two_ranks_hold_different_parts(fresh):
    first, second = fresh["qwen2_wide-2"]["live"]
    assert {name.split(".")[-2] for name in first if first[name] != second[name]} == {
        *("embed_tokens", "lm_head", "qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    }


def test_a_boot_leaves_what_the_public_quantizer_gives(fresh):
    assert fresh["qwen3-1"]["wrong"] == []


def test_sglang_itself_does_not_load_the_block_scales_of_llamas(fresh):
    """It looks for them by the name that per-tensor scales have: sgl-project/sglang#30234. Mistral is a Llama there."""
    assert set(fresh["mistral-1"]["wrong"]) == {f"{name}.weight_scale_inv" for name in LINEARS | FUSED_LINEARS}


@every_engine
def test_sglangs_own_choice_of_a_product_is_its_triton_kernel(name, fresh):
    for linears in fresh[name]["linears"]:
        assert linears.keys() == LINEARS | FUSED_LINEARS
        assert set(linears.values()) == {"triton_w8a8_block_fp8_linear"}


@every_engine
def test_answers_are_the_same_each_time_with_an_empty_cache(name, fresh):
    assert fresh[name]["cold"] == {key: fresh[name][key] for key in ("live", "outputs")}
    assert [output["num_cached"] for output in fresh[name]["outputs"]] == [0, 0]
    assert [len(output["tokens"]) for output in fresh[name]["outputs"]] == [4, 4]


@every_engine
def test_a_repeated_prompt_meets_the_radix_cache(name, fresh):
    assert [output["num_cached"] for output in fresh[name]["again"]] == [23, 199]
    assert fresh[name]["num_unfinished"] == 0


def test_a_stubbed_kernel_imports_and_cannot_be_called(environment, tmp_path):
    code = """
import sgl_kernel
from sgl_kernel.flash_attn import flash_attn_varlen_func
try:
    flash_attn_varlen_func(1)
except NotImplementedError as error:
    print(error)
"""
    output = run_python(["-c", code], environment, tmp_path, timeout_s=30)
    assert "sgl_kernel.flash_attn.flash_attn_varlen_func is a stub" in output
