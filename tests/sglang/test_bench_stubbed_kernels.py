"""The benchmark of rollouts on a real SGLang engine. What is and is not real here: `conftest.py`."""

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


def test_a_bf16_engine_of_the_rollout_benchmark_holds_the_same_policy_as_others(run_engine):
    found = run_engine("rollouts")
    assert found["loaded"] == found["fresh"] != found["booted"]
