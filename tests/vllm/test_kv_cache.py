"""FP8 KV caches of real vLLM engines: what calibration does to log-probabilities and scales, and when it fails.

On the CPU: `conftest.py` says what that does not claim. All tests read what four engines in one process found
(`kv_cache.py`), two with a BF16 KV cache for reference. Which scales and batches an engine takes, `test_conformance.py` checks.
"""

from statistics import fmean

import pytest

from tests.outliers import BATCH, calm_policy, largest_keys_and_values, with_larger_keys, with_outliers

pytestmark = pytest.mark.vllm

MARGIN = 1.05
QWEN, LLAMA = "qwen3_deep", "llama_deep"
LAST = "model.layers.3.self_attn"


@pytest.fixture(scope="module")
def found(run_engine, tmp_path_factory):
    return run_engine("kv cache", work=tmp_path_factory.mktemp("kv"))


def error_of(found, said: list[float], family: str, policy: str) -> float:
    """Mean distance of log-probabilities from those over a BF16 KV cache."""
    return fmean(abs(a - b) for a, b in zip(said, found["said"][family][policy], strict=True))


def copies_of(scales: dict[str, float]) -> dict[str, float]:
    """What every copy of every scale has to be on a CPU engine, which uses none for queries and probabilities."""
    copies = {}
    for name, scale in scales.items():
        attention, _, leaf = name.rpartition(".")
        copies |= {f"{attention}.attn._{leaf}{kind}": scale for kind in ("", "_float", "_cpu")}
        copies |= {f"{attention}.attn._{kind}_scale{end}": 1.0 for kind in ("q", "prob") for end in ("", "_float")}
    return copies


# What an engine says.


def test_calibrated_scales_bring_a_policy_with_outliers_close_to_a_bf16_cache(found):
    ones, calibrated = (
        error_of(found, found["policies"]["outliers"][kind], QWEN, "outliers") for kind in ("ones", "calibrated")
    )
    assert ones > 5 * calibrated


def test_the_policy_has_large_and_small_keys(found):
    scales = found["policies"]["outliers"]["scales"]
    largest = [scale * 448 / MARGIN for name, scale in scales.items() if name.endswith("k_scale")]
    assert 0.05 < min(largest) < 0.2
    assert 1500 < max(largest) < 3000


def test_calibration_does_no_harm_where_scales_of_one_do_well(found):
    ones, calibrated = (
        error_of(found, found["policies"]["base"][kind], QWEN, "base") for kind in ("ones", "calibrated")
    )
    assert calibrated < 1.1 * ones


def test_another_policy_under_stale_scales_is_wrong_until_it_is_calibrated(found):
    keys = found["larger keys"]
    base = error_of(found, keys["base calibrated"], LLAMA, "base")
    stale, calibrated = (error_of(found, keys[kind], LLAMA, "larger keys") for kind in ("stale", "calibrated"))
    assert stale > 2.5 * calibrated
    assert calibrated < 1.5 * base


# Scales.


@pytest.mark.parametrize("policy", ["base", "outliers", "llama", "llama with larger keys"])
def test_scales_are_what_an_independent_pass_of_transformers_shows(policy, found):
    if policy in ("base", "outliers"):
        scales, state = found["policies"][policy]["scales"], calm_policy(QWEN, 2)
        state = with_outliers(state) if policy == "outliers" else state
        largest = largest_keys_and_values(QWEN, state, BATCH)
    else:
        is_larger, state = policy.endswith("keys"), calm_policy(LLAMA, 2)
        scales = found["larger keys"]["larger" if is_larger else "base"]
        largest = largest_keys_and_values(LLAMA, with_larger_keys(state, 8) if is_larger else state, BATCH)
    assert {name: scale * 448 / MARGIN for name, scale in scales.items()} == pytest.approx(largest, rel=0.02)


def test_the_first_refit_of_a_dummy_boot_calibrates_and_leaves_no_noise(found):
    first = found["first refit"]
    assert all(scale == pytest.approx(0.3) for scale in first["booted"].values())
    assert len(first["scales"]) == 8
    assert first["copies"] == copies_of(first["scales"])
    assert first["scales"] == found["policies"]["outliers"]["scales"]
    assert (first["version"], first["moved"], first["traces"]) == (1, False, [])


# Errors.


def test_an_engine_with_a_bf16_cache_says_what_to_boot_and_serves_on(found):
    without = found["without"]
    assert without["refused"]["error"] == "UnsupportedEngineError"
    assert 'Boot with kv_cache_dtype="fp8"' in without["refused"]["message"]
    assert without["untouched"] and not without["dirty"]
    assert (without["serves"], without["traces"]) == (1, [])


def test_scales_in_the_state_dict_of_an_engine_with_a_bf16_cache_are_ignored(found):
    without = found["without"]
    assert (without["ignored"], without["kv"], without["scales_untouched"]) == ([f"{LAST}.k_scale"], None, True)


def test_a_pass_that_fails_after_the_weights_were_written_leaves_the_engine_dirty_until_the_next_refit(found):
    failure = found["failing pass"]
    assert (failure["refused"]["error"], failure["refused"]["message"]) == ("RuntimeError", "injected")
    assert (failure["dirty"], failure["hooks"], failure["still_dirty"]) == (True, [], False)
    assert (failure["serves"], failure["traces"]) == (1, [])
    assert failure["scales"] == found["policies"]["base"]["scales"]
    assert failure["copies"] == copies_of(failure["scales"])
