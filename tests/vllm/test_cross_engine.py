"""vLLM holds after a refit what every other engine holds after the same one. On the CPU: see `conftest.py`."""

import pytest

from tests.cross_engine import DIGEST

pytestmark = pytest.mark.vllm


def test_a_refit_leaves_the_same_weights_and_scales_as_in_other_engines(run_engine, tmp_path):
    assert run_engine("cross engine", work=tmp_path)["digest"] == DIGEST
