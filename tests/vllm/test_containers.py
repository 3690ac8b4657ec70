"""vLLM engines that boot from checkpoints of other containers than DeepSeek's, in other processes. In this one: `test_refit.py`
and `test_experts.py`.
"""

import pytest

from tests.engines.containers import check

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(118)]
CASES = [
    ("core in process", "qwen2_wide", "compressed-tensors"),
    ("core in process", "qwen2_wide", "compressed-tensors, per channel"),
    ("core in process", "qwen2_wide", "fp8_per_channel"),
    ("multi-process", "qwen3", "fp8_per_channel"),
    ("core in process", "qwen3_moe", "fp8_per_channel"),
    ("expert parallel", "qwen3_moe", "fp8_per_channel"),
    ("expert parallel", "qwen3_moe", "compressed-tensors, per channel"),
    ("core in process", "qwen2_wide", "fp8_per_tensor"),
    ("core in process", "qwen3_moe", "fp8_per_tensor"),
    ("expert parallel", "qwen3_moe", "fp8_per_tensor"),
    ("core in process", "qwen2_wide", "compressed-tensors, per tensor"),
    ("core in process", "qwen2_wide", "compressed-tensors, static"),
    ("multi-process", "qwen3", "fp8, static"),
    ("expert parallel", "qwen3_moe", "modelopt, static"),
    ("core in process", "qwen2_wide", "mxfp8"),
    ("multi-process", "qwen3", "mxfp8"),
    ("core in process", "qwen2_wide", "mxfp8 in tiles"),
    ("multi-process", "qwen3", "mxfp8 in tiles"),
    ("expert parallel", "qwen3_moe", "mxfp8"),
    ("expert parallel", "qwen3_moe_many", "mxfp8 in tiles"),
    ("multi-process", "qwen3", "modelopt"),
    ("core in process", "qwen2_wide", "modelopt, nvfp4"),
    ("multi-process", "qwen3", "modelopt, nvfp4"),
    ("core in process", "qwen2_wide", "modelopt, nvfp4 in tiles"),
    ("expert parallel", "qwen3_moe_many", "modelopt, nvfp4 in tiles"),
    ("expert parallel", "qwen3_moe", "compressed-tensors"),
    ("core in process", "qwen2_wide", "unquantized"),
    ("expert parallel", "qwen3_moe", "unquantized"),
    ("core in process", "qwen3_moe", "unquantized in up first"),
]


@pytest.mark.parametrize(("layout", "family", "container"), CASES)
def test_an_engine_in_another_container_is_refitted(layout, family, container, run_engine, tmp_path):
    found = run_engine("container", within_s=110, layout=layout, family=family, container=container, work=tmp_path)
    check(found, container)
