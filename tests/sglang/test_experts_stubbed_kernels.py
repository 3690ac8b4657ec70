"""Refitted SGLang engines of mixtures of experts, with stubbed kernels, against fresh ones; over two ranks.

One family is cut across each expert (TP), and has a shared expert and a router in float32; the other has its experts dealt out
(EP), and calls their matrices `w1`, `w2` and `w3`. What is and is not real here: `conftest.py`, `cpu_experts.py`.
"""

from importlib.metadata import version

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

SOURCES = ["stacked", "stacked, one-shot", "apart", "apart, one-shot", "block-FP8 safetensors"]


@pytest.fixture(scope="module", params=["TP", "EP"])
def found(request, run_engine):
    """What a fresh engine and a refitted one of two ranks hold and say."""
    if request.param == "EP":
        return run_engine("experts", family="mixtral", num_ranks=2, ep_size=2)
    if version("sglang") == "0.5.15":
        pytest.skip("0.5.15 does not import GLM-4-MoE without CUTLASS's Python")
    return run_engine("experts", family="glm4_moe", num_ranks=2, ep_size=1)


def test_every_byte_of_every_rank_equals_that_of_a_fresh_engine(found):
    assert found["refitted"]["live"] == found["fresh"]["live"]
    assert [len(live) > 20 for live in found["fresh"]["live"]] == [True, True]


def test_tokens_and_log_probabilities_equal_those_of_a_fresh_engine(found):
    assert found["refitted"]["outputs"] == found["fresh"]["outputs"] != found["noise"]["outputs"]


@pytest.mark.parametrize("kind", SOURCES)
def test_experts_come_stacked_or_apart_in_mappings_and_streams(kind, found):
    assert found["sources"][kind] == found["fresh"]["live"]


def test_experts_of_each_rank_are_what_the_public_quantizer_gives(found):
    for live, expected, noise in zip(found["refitted"]["live"], found["expected"], found["noise"]["live"], strict=True):
        assert len(expected) in (4, 4 * 4)  # one layer of two, as the first is dense; or all four
        assert {name: live[name] for name in expected} == expected
        assert not {noise[name] for name in expected} & set(expected.values())


def test_ranks_hold_different_parts_of_the_experts(found):
    first, second = found["expected"]
    assert all(first[name] != second[name] for name in first)


def test_tensors_keep_identity_address_and_layout(found):
    assert found["moved"] == [[], []]
