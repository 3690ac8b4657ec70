"""FP8 KV caches of real vLLM engines: what calibration does to log-probabilities, scales and caches, and when it fails.

On the CPU: `conftest.py` says what that does not claim. All tests read what four engines in one process found
(`kv_cache.py`), two with a BF16 KV cache for reference; each thing that went wrong in one was healed before the next.
"""

from statistics import fmean

import pytest

from tests.outliers import BATCH, calm_policy, largest_keys_and_values, with_larger_keys, with_outliers

pytestmark = pytest.mark.vllm

MARGIN = 1.05
QWEN, LLAMA = "qwen3_deep", "llama_deep"
LAST = "model.layers.3.self_attn"
NUM_SCALES = 8
WAYS = [
    "kv_scales",
    "kv_scales as engines spell them",
    "kv_scales with queries'",
    "kv_scales over the mapping's",
    "mapping",
    "mapping with queries'",
    "iterator",
]
REFUSALS = {
    "zero": ("InvalidCalibrationError", f"{LAST}.k_scale: is 0; a KV-cache scale must be finite and positive"),
    "NaN": ("InvalidCalibrationError", f"{LAST}.k_scale: is nan; a KV-cache scale must be finite and positive"),
    "negative": ("InvalidCalibrationError", f"{LAST}.k_scale: is -1; a KV-cache scale must be finite and positive"),
    "infinite": ("InvalidCalibrationError", f"{LAST}.k_scale: is inf; a KV-cache scale must be finite and positive"),
    "not one number": ("InvalidCalibrationError", f"{LAST}.k_scale has shape [2]"),
    "unknown name": ("InvalidCalibrationError", "this engine has no model.layers.9.self_attn.k_scale"),
    "both": ("InvalidCalibrationError", "give a calibration batch or kv_scales, not both"),
    "no token": ("InvalidCalibrationError", "it holds no sequence"),
    "out of vocabulary": ("InvalidCalibrationError", "token id 259 is outside the vocabulary of 259"),
    "too long": ("InvalidCalibrationError", "a sequence has 513 tokens, but the engine takes at most 512"),
    "prompts": ("UnsupportedEngineError", "booted with skip_tokenizer_init; pass token ids instead of prompts"),
    "no token, calibrate": ("InvalidCalibrationError", "it holds no sequence"),
    "out of vocabulary, calibrate": ("InvalidCalibrationError", "outside the vocabulary"),
    "too long, calibrate": ("InvalidCalibrationError", "a sequence has 513 tokens, but the engine takes at most 512"),
    "prompts, calibrate": ("UnsupportedEngineError", "pass token ids instead of prompts"),
}
FAILURES = {
    "NaN policy": ("CalibrationError", "NaN or Inf in the attention"),
    "failing pass": ("RuntimeError", "injected"),
    "bad scales sent": ("InvalidSourceError", f"{LAST}.v_scale: is nan; a KV-cache scale must be finite and positive"),
}


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
    assert len(first["report"]["scales"]) == NUM_SCALES
    assert first["copies"] == copies_of(first["report"]["scales"])
    assert first["report"]["scales"] == found["policies"]["outliers"]["scales"]
    assert (first["version"], first["moved"], first["traces"]) == (1, False, [])


def test_the_report_says_what_was_measured_and_how_long_it_took(found):
    report = found["first refit"]["report"]
    num_tokens = sum(map(len, BATCH))
    assert (report["origin"], report["kept"]) == ("calibration", [])
    assert (report["num_sequences"], report["num_tokens"], report["num_passes"]) == (len(BATCH), num_tokens, 1)
    assert report["seconds"] > 0
    assert "kv" in found["first refit"]["phases"]


@pytest.mark.parametrize("policy", ["base", "outliers"])
def test_calibration_changes_no_weight(policy, found):
    assert found["policies"][policy]["same weights"]


def test_a_plain_refit_carries_scales_over(found):
    assert found["calibrate"]["plain"] is None
    assert found["calibrate"]["carried"]


def test_calibration_alone_gives_what_a_refit_with_it_gives_and_writes_nothing_else(found):
    calibrate = found["calibrate"]
    assert calibrate["report"]["scales"] == calibrate["refit"]
    assert calibrate["copies"] == copies_of(calibrate["refit"])
    assert calibrate["untouched"]
    assert calibrate["traces"] == []


def test_the_same_tokens_in_lists_in_a_tensor_and_padded_give_the_same_scales(found):
    batches = found["batches"]
    assert len(batches["lists"]) == NUM_SCALES
    assert batches["lists"] == batches["tensor"] == batches["padded"]


def test_the_config_says_how_much_of_a_batch_is_used_and_which_scales_are_set(found):
    batches = found["batches"]
    assert batches["cut"] == [2, 50, 1]
    assert sorted(batches["keys"]) == [f"model.layers.{index}.self_attn.k_scale" for index in range(4)]
    wanted = {name: scale / MARGIN * 2 for name, scale in batches["lists"].items() if name in batches["keys"]}
    assert batches["keys"] == pytest.approx(wanted, rel=1e-6)
    copies = copies_of(batches["keys"])
    assert {name: scale for name, scale in batches["copies"].items() if name in copies} == copies
    assert all(scale > 0 for scale in batches["copies"].values())


@pytest.mark.parametrize("way", WAYS)
def test_scales_of_a_trainer_are_written_to_every_copy(way, found):
    given = found["given"]["ways"][way]
    assert given["report"]["scales"] == found["given"]["wanted"]
    assert given["report"]["origin"] == ("kv_scales" if way.startswith("kv_scales") else "state_dict")
    assert given["copies"] == copies_of(found["given"]["wanted"])


def test_scales_of_queries_are_accepted_by_an_engine_that_has_none(found):
    ignored = {way: given["ignored"] for way, given in found["given"]["ways"].items() if given["ignored"]}
    assert ignored == {"mapping with queries'": [f"{LAST}.q_scale", "model.layers.0.self_attn.attn.q_scale"]}


def test_scales_of_a_trainer_are_carried_over_too(found):
    assert found["given"]["carried"] == copies_of(found["given"]["wanted"])
    assert found["given"]["traces"] == []


# Caches.


@pytest.mark.parametrize("change", ["refit", "calibrate"])
def test_no_cached_key_under_old_scales_is_used_again(change, found):
    steps = found["prefix cache"]
    assert steps["nothing"][1] > 0, "a repeated prompt is cached"
    assert steps[change][0] == 0
    assert steps[change][1] > 0


# Errors.


@pytest.mark.parametrize("attempt", ["refit", "given", "calibrate"])
def test_an_engine_with_a_bf16_cache_says_what_to_boot_and_serves_on(attempt, found):
    without = found["without"][attempt]
    assert without["refused"]["error"] == "UnsupportedEngineError"
    assert 'Boot with kv_cache_dtype="fp8"' in without["refused"]["message"]
    assert without["untouched"] and not without["dirty"]
    assert (without["serves"], without["traces"]) == (1, [])


def test_scales_in_the_state_dict_of_an_engine_with_a_bf16_cache_are_ignored(found):
    assert found["without"]["sent"] == {"ignored": [f"{LAST}.k_scale"], "kv": None, "untouched": True}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_does_not_fit_is_refused_before_a_byte_is_written(kind, found):
    refusal = found["refusals"][kind]
    error, message = REFUSALS[kind]
    assert refusal["refused"]["error"] == error
    assert message in refusal["refused"]["message"]
    assert refusal["untouched"] and not refusal["dirty"]
    assert (refusal["serves"], refusal["traces"]) == (1, [])


def test_an_engine_with_unfinished_requests_is_not_calibrated(found):
    busy = found["busy"]
    assert busy["refused"]["error"] == "EngineBusyError"
    assert busy["untouched"] and not busy["dirty"]
    assert busy["finished"] == 6


@pytest.mark.parametrize("kind", FAILURES)
def test_what_fails_after_the_weights_were_written_leaves_the_engine_dirty_until_the_next_refit(kind, found):
    failure = found[kind]
    error, message = FAILURES[kind]
    assert failure["refused"]["error"] == error
    assert message in failure["refused"]["message"]
    assert failure["dirty"]
    assert failure["hooks"] == []
    assert not failure["still_dirty"]
    assert (failure["serves"], failure["traces"]) == (1, [])
    assert failure["scales"] == found["policies"]["base"]["scales"]
    assert failure["copies"] == copies_of(failure["scales"])


@pytest.mark.parametrize("entry", ["generate", "add_request", "calibrate"])
@pytest.mark.parametrize("kind", FAILURES)
def test_a_dirty_engine_refuses_requests_and_calibration_at_once(kind, entry, found):
    refusal = found[kind][entry]
    assert refusal["error"] == "EngineDirtyError"
    assert refusal["seconds"] < 1


def test_the_layers_that_saw_nan_are_named(found):
    message = found["NaN policy"]["refused"]["message"]
    assert "6 place(s), model.layers.1.self_attn.k_scale, model.layers.1.self_attn.v_scale" in message


def test_a_calibration_alone_that_fails_writes_nothing_and_the_engine_serves_on(found):
    failure = found["failing pass alone"]
    assert failure["refused"]["message"] == "injected"
    assert failure["untouched"] and not failure["dirty"]
    assert (failure["serves"], failure["traces"]) == (1, [])
