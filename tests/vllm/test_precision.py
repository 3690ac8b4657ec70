"""A trainer that computes with the codes and scales of a real vLLM engine. What is and is not real here: `conftest.py`."""

import pytest

from tests.engines.precision import NUM_UNIFIED, hold_what_is_served
from tests.tiny_models import save_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]
CASES = [("qwen3", "fp32"), ("qwen3", "ue8m0"), ("qwen3_moe", "fp32"), ("qwen3_moe", "ue8m0")]


@pytest.fixture(scope="module")
def trained(run_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("precision")
    for family in NUM_UNIFIED:
        save_model(family, 2, folder / f"{family}-bf16")
    return run_engine("precision", cases=CASES, work=folder)


@pytest.mark.parametrize(("family", "kernel"), CASES)
def test_training_codes_and_scales_are_the_engines(trained, family, kernel):
    hold_what_is_served(trained[f"{family}-{kernel}"], family, kernel)
