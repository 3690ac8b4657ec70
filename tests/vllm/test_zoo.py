"""Families whose checkpoints nobody wrote down for fp8refit: engines of each are refitted by what their own loaders do."""

import pytest

pytestmark = pytest.mark.vllm

FAMILIES = [
    "dots1",
    "ernie4_5_moe",
    "apertus",
    "bloom",
    "gpt_neox",
    "gpt2",
    "granitemoe",
    "qwen3_next",
    "jamba",
    "falcon_h1",
]
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def found(run_engine, tmp_path_factory):
    return run_engine("zoo", families=FAMILIES, work=tmp_path_factory.mktemp("zoo"))


@every_family
def test_every_tensor_is_what_the_engines_own_loader_makes_of_the_policy(family, found):
    assert "error" not in found[family], found[family]["error"]
    assert found[family]["refusals"] == []
    assert found[family]["num_quantized"] > 0
    assert found[family]["wrong"] == found[family]["wrong_from_files"] == []


@every_family
def test_an_engine_says_something_else_after_a_refit(family, found):
    has_kernels = family != "jamba"  # vLLM's CPU has no selective scan
    assert (found[family]["generated"] != found[family]["before"]) == has_kernels


@every_family
def test_the_twin_leaves_nothing_behind(family, found):
    assert found[family]["left"]
