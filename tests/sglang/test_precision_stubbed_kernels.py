"""A trainer that computes with the codes and scales of a real SGLang engine. What is and is not real here: `conftest.py`."""

import pytest

from tests.engines.precision import NUM_UNIFIED, hold_what_is_served

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def trained(run_engine):
    return run_engine("precision", families=list(NUM_UNIFIED))


@pytest.mark.parametrize("family", NUM_UNIFIED)
def test_training_codes_and_scales_are_the_engines(trained, family):
    hold_what_is_served(trained[family], family, "fp32")
