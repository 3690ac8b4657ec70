"""Copies of weights that a live vLLM engine keeps beside its parameters: refreshed, or refused by module and attribute.

`kept_copies.py` makes the engines, real ones on a CPU. What FlashInfer does with its sinks, and vLLM's experts with their
gates, is run for real as far as it needs no GPU.
"""

import pytest

pytestmark = pytest.mark.vllm

PLACES = {
    "attribute": "self_attn: keeps `joined` (bfloat16 [256])",
    "impl": "self_attn.attn: keeps `impl.joined` (bfloat16 [256])",
    "late buffer": "self_attn: keeps `joined` (bfloat16 [256])",
    "buffer": "self_attn: keeps `built` (bfloat16 [256])",
    "closure": "self_attn: keeps `joined.joined` (bfloat16 [256])",
}
"""Where an attention of Qwen3 keeps what it joined at its first forward, as a refusal says it."""


@pytest.fixture(scope="module")
def joined(run_engine, tmp_path_factory):
    return run_engine("joined copies", work=tmp_path_factory.mktemp("joined"))


@pytest.mark.parametrize("way", PLACES)
def test_a_copy_made_at_the_first_forward_is_refused_by_name_before_anything_is_written(way, joined):
    found = joined[way]
    assert found["before"] is None
    assert found["late"]["error"] == "UnsupportedEngineError"
    expected = [f"model.layers.{layer}.{PLACES[way]}" for layer in range(2)]
    named = sorted(found["late"]["named"])
    assert len(named) == 2
    assert all(line.startswith(start) for line, start in zip(named, expected, strict=True))
    assert sorted(found["layout"]) == named
    assert found["is_first_served"]


@pytest.mark.parametrize("way", PLACES)
def test_without_the_copy_the_engine_is_refitted(way, joined):
    assert joined[way]["healed"] is None
    assert joined[way]["is_second_served"]


def test_a_copy_made_between_boot_and_the_first_refit_is_refused(joined):
    assert joined["after boot"]["error"] == "UnsupportedEngineError"
    assert any(line.startswith("model.layers.0.self_attn: keeps `joined`") for line in joined["after boot"]["named"])


def test_a_head_that_vllm_packed_for_a_cpu_is_refused(run_engine, tmp_path):
    found = run_engine("packed head", work=tmp_path)
    assert found["before"] is None
    if not found["is_packed"]:
        assert found["packed"] is None
        pytest.skip("oneDNN packs no BF16 weights on this CPU")
    assert found["packed"]["error"] == "UnsupportedEngineError"
    assert any(line.startswith("lm_head: keeps `cpu_linear.") for line in found["packed"]["named"])


def test_flashinfer_s_sinks_in_float32_follow_a_refit_in_place(run_engine, tmp_path):
    found = run_engine("sinks", work=tmp_path)
    assert found == {"error": None, "dtype": "torch.float32", "is_in_place": True, "is_fresh": True}


def test_gates_that_experts_joined_follow_a_refit(run_engine, tmp_path):
    assert run_engine("joined gates", work=tmp_path) == {"is_fresh": True, "has_changed": True}
