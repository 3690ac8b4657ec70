"""SGLang engines that boot from checkpoints of other containers than DeepSeek's, with stubbed kernels."""

import pytest

from tests.engines.containers import check

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(118)]
CASES = [
    ("qwen3", 1, "compressed-tensors"),
    ("qwen2_wide", 2, "compressed-tensors"),
    ("qwen2_wide", 2, "compressed-tensors, per channel"),
    ("qwen3_moe", 2, "compressed-tensors"),
    ("qwen3_moe", 2, "compressed-tensors, per channel"),
    ("qwen3", 1, "fp8"),
    ("qwen2_wide", 2, "w8a8_fp8"),
    ("qwen3_moe", 1, "fp8"),
    ("qwen3_moe", 2, "fp8"),
    ("qwen3_moe", 2, "fp8, expert parallel"),
    ("qwen2_wide", 2, "unquantized"),
    ("qwen3_moe", 2, "unquantized"),
]


@pytest.mark.parametrize(("family", "num_ranks", "container"), CASES)
def test_an_engine_in_another_container_is_refitted(family, num_ranks, container, run_engine):
    check(run_engine("container", family=family, num_ranks=num_ranks, container=container), container)
