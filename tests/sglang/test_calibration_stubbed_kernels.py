"""KV-cache scales of real SGLang engines with stubbed kernels, of one rank and of two, against transformers.

What is and is not real here: `conftest.py`, `calibrations.py`.
"""

import pytest

from tests.sglang.conftest import REFITTED

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


def assert_calibrated(found: dict, num_ranks: int) -> None:
    """Every rank holds the same scales, as a tensor and as a number, and they are those of the reference."""
    assert found["scales"] == pytest.approx(found["expected"], rel=0.02)
    assert found["held"] == [{name: [scale, scale] for name, scale in found["scales"].items()}] * num_ranks
    assert found["num_tokens"] == 229
    assert found["held_after_a_refit"] == found["held"]


def assert_no_trace(found: dict) -> None:
    """The pass neither wrote the KV cache nor left anything on the engine, which answers as before it."""
    assert found["is_cache_untouched"]
    assert found["traces"] == []
    assert found["says_the_same"]


def test_an_engine_refitted_from_noise_is_calibrated(refits):
    assert_calibrated(refits.found["calibration"], refits.num_ranks)
    assert_no_trace(refits.found["calibration"])


@pytest.mark.parametrize("family", REFITTED)
def test_an_engine_booted_from_a_checkpoint_is_calibrated(family, fresh):
    assert_calibrated(fresh[f"{family}-1"]["calibration"], 1)
    assert_no_trace(fresh[f"{family}-1"]["calibration"])


def test_an_engine_without_an_fp8_cache_says_what_to_set(refits):
    refusal = refits.found["no FP8 cache"]
    assert refusal["error"] == "UnsupportedEngineError"
    assert refusal["named"] == ['KV cache: is bfloat16, not fp8_e4m3. Boot with kv_cache_dtype="fp8_e4m3"']
