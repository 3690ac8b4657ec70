"""A trainer that computes with the codes and scales of a real SGLang engine. What is and is not real here: `conftest.py`."""

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
NUM_UNIFIED = {"qwen3": 14, "qwen3_moe": 12}


@pytest.fixture(scope="module")
def trained(run_engine):
    return run_engine("precision", families=list(NUM_UNIFIED))


@pytest.mark.parametrize("family", NUM_UNIFIED)
def test_training_codes_and_scales_are_the_engines(trained, family):
    found = trained[family]
    assert found["formats"] == ["fp32"]
    assert found["num_unified"] == NUM_UNIFIED[family]
    assert found["num_quantized"] == [0, 0]
    assert found["from_codes"] == found["from_bf16"]
    assert found["from_codes"][0] != found["from_codes"][1]
    assert found["losses"][1] < found["losses"][0]
