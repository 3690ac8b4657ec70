"""vLLM holds after a refit what every other engine holds after the same one. On the CPU: see `conftest.py`."""

import pytest

from tests.cross_engine import DIGEST
from tests.vllm.processes import HERE

pytestmark = pytest.mark.vllm


def test_a_refit_leaves_the_same_weights_and_scales_as_in_other_engines(python, tmp_path):
    output = python(HERE / "run_cross_engine.py", tmp_path / "model")
    assert f"digest: {DIGEST}" in output.splitlines()
