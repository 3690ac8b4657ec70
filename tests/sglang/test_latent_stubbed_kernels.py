"""A refitted SGLang engine with latent attention (MLA) against a fresh one: bytes, absorbed copies among them, and outputs.

What is and is not real here: `conftest.py`. SGLang makes the absorbed copies as on CUDA, and its torch-native attention reads
latents in prefill too (`cpu_linear.py`); its own choice for prefill has no kernel on a CPU.
"""

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

NUM_RANKS = 2
ATTENTION = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def found(run_engine):
    return run_engine("latent", family="deepseek_v3", num_ranks=NUM_RANKS)


def test_every_tensor_and_absorbed_copy_of_every_rank_equals_that_of_a_fresh_engine(found):
    first, second = found["fresh"]["live"]
    for copy in ("w_kc", "w_vc"):
        assert first[f"{ATTENTION}.{copy}"] != second[f"{ATTENTION}.{copy}"]
    assert found["policies"]["rounds"][1]["live"] == [first, second]


def test_tokens_and_log_probabilities_equal_those_of_a_fresh_engine(found):
    assert found["policies"]["rounds"][1]["outputs"] == found["fresh"]["outputs"]


def test_tensors_and_absorbed_copies_stay_in_place_and_a_policy_comes_back(found):
    assert found["policies"]["moved"] == [[]] * NUM_RANKS
    first, second, third = found["policies"]["rounds"]
    assert first["live"] == third["live"] != second["live"]
    assert first["outputs"] == third["outputs"] != second["outputs"]


def test_fused_projections_are_known_by_their_parts(found):
    slots = {slot["name"]: slot for slot in found["layout"]["slots"]}
    fused = [slots[f"{ATTENTION}.{part}.weight"] for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert [slot["shape"] for slot in fused] == [[128, 256], [576, 256]]
    assert {slot["module"] for slot in fused} == {f"{ATTENTION}.fused_qkv_a_proj_with_mqa"}
    assert found["layout"]["aliases"] == {}


def test_what_sglang_skips_of_a_checkpoint_with_a_draft_is_ignored(found):
    drafts = found["drafts"]
    assert len(drafts["names"]) > 10
    assert drafts["ignored"] == dict.fromkeys(("first", "stream"), drafts["names"])
    assert all(drafts["same"].values())
