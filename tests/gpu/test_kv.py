"""FP8 KV-cache scales on a real GPU: what they do to log-probabilities, whom they agree with, and what they cost.

    python -m pytest tests/gpu/test_kv.py                            # the engine that is installed, Qwen3-8B shape
    FP8REFIT_KV=scales,ranks,sleep,backends python -m pytest ...     # some of it; ranks needs two GPUs

Every engine, and the model of transformers, is in a process of its own (`kv_modes.py`). What is not asked for is taken from the
working folder, if it was found there before. Writes a result for the documentation.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.scripts import run_scenario, write_result

ENGINE = "vllm" if find_spec("vllm") is not None else "sglang"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(find_spec(ENGINE) is None, reason="needs vLLM or SGLang"),
    pytest.mark.timeout(1200),
]

SHAPE = os.environ.get("FP8REFIT_GPU_SHAPE", "qwen3-8b")
SMALL_SHAPE = "qwen3-0.6b-untied"
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit")) / "kv"
TIMEOUT_S = float(os.environ.get("FP8REFIT_TIMEOUT_S", "300"))
ASKED = os.environ.get("FP8REFIT_KV", "scales").split(",")
FORMAT = {"vllm": "ue8m0", "sglang": "fp32"}[ENGINE]
"""Of the scales of the engine's default kernels on this GPU."""
PLAIN_KERNELS = {"VLLM_USE_DEEP_GEMM": "0"}
"""Kernels that start fast on any number of ranks."""
FIRST_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
MARGIN = 1.05
STEPS = {
    "sleep-first-runner": "sleep",
    "sleep-default-runner": "sleep",
    "tp1": "ranks",
    "tp2": "ranks",
    "triton": "backends",
}
"""By the names of their results."""


def command_of(*steps):
    """What finds again what these steps found."""
    return f"FP8REFIT_KV={','.join(steps)} python -m pytest tests/gpu/test_kv.py"


def take(step, name, mode, shape=SHAPE, environment=None, **options):
    """What a process found, now or before."""
    out = WORK / f"{ENGINE}-{name}.json"
    if step not in ASKED and name not in ASKED:
        if not out.exists():
            pytest.skip(f"{step} was not asked for")
        return json.loads(out.read_text())
    arguments = [mode, "--shape", shape, "--work", WORK / name]
    for option, value in options.items():
        arguments += [f"--{option}", value]
    log = f"kv-{ENGINE}-{name}"
    return run_scenario("kv", arguments, out=out, log=log, timeout_s=TIMEOUT_S, environment=environment)


@pytest.fixture(scope="module")
def reference():
    return take("scales", "reference", ENGINE, kv="auto")


@pytest.fixture(scope="module")
def scales(reference):
    return take("scales", "scales", ENGINE, reference=WORK / f"{ENGINE}-reference.json")


@pytest.fixture(scope="module")
def independent():
    return take("scales", "transformers", f"transformers-{FORMAT}")["amax"]


@pytest.fixture(scope="module")
def ranks():
    if {"ranks", "tp2"} & set(ASKED) and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return {tp: take("ranks", f"tp{tp}", ENGINE, SMALL_SHAPE, PLAIN_KERNELS, tp=tp) for tp in (1, 2)}


@pytest.fixture(scope="module", params=["first runner", "default runner"])
def slept(request):
    if ENGINE != "vllm":
        pytest.skip("weights that SGLang releases come back with a refit: test_sglang.py")
    environment = FIRST_RUNNER if request.param == "first runner" else {}
    return take("sleep", f"sleep-{request.param.replace(' ', '-')}", "vllm-sleep", SMALL_SHAPE, environment)


@pytest.fixture(scope="module")
def triton():
    backend = {"vllm": "TRITON_ATTN", "sglang": "triton"}[ENGINE]
    return take("backends", "triton", ENGINE, SMALL_SHAPE, PLAIN_KERNELS, backend=backend)


def deviations(found, amax, kind):
    """By how much a measured maximum differs from the independent one, layer by layer."""
    names = [name for name in found if name.endswith(f"{kind}_scale")]
    return [found[name] * 448 / margin() / amax[name] - 1 for name in names]


def margin():
    """The margin that an engine uses: 2 where PyTorch's cast does not clamp for it."""
    large = torch.full((1,), 1e4, device="cuda").to(torch.float8_e4m3fn)
    return MARGIN if ENGINE == "vllm" or bool(large.float().isfinite().all()) else 2.0


def maxima_of_keys(scales):
    return [scale * 448 / margin() for name, scale in scales["scales"]["outliers"].items() if "k_scale" in name]


def test_keys_span_four_orders_of_magnitude(scales):
    maxima = maxima_of_keys(scales)
    assert min(maxima) < 0.2 and max(maxima) > 2000


def test_calibration_takes_the_error_away(scales):
    errors = scales["errors"]
    assert errors["outliers calibrated"] * 5 <= errors["outliers 1.0"]
    assert errors["larger calibrated"] * 2 <= errors["larger stale"]
    # What is left is that of FP8 itself: an ordinary policy has it too, with the best scales.
    assert errors["outliers calibrated"] <= 2 * errors["base calibrated"]
    assert errors["base calibrated"] <= 1.5 * errors["base 1.0"]


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("calm base", 0.02), ("calm outliers", 0.02), ("base", 0.04), ("outliers", 0.04)]
)
def test_scales_agree_with_an_independent_pass(scales, independent, policy, tolerance):
    found = scales["scales"][policy]
    kinds = {name[-7] for name in found}
    assert kinds >= {"k", "v"}
    for kind in sorted(kinds):
        worst = max(deviations(found, independent[policy], kind), key=abs)
        assert abs(worst) <= tolerance, f"{kind}: {worst:+.3%}"


def test_graphs_decode_with_the_scales_that_prefills_use(scales):
    assert scales["graph_replays"] > 0
    assert 0 < scales["decode_against_prefill"] <= scales["errors"]["base calibrated"]


def test_no_cached_prompt_outlives_a_refit(scales):
    cached = scales["cached_tokens"]
    assert cached["before"] > 0 and cached["after"] == 0 and cached["again"] > 0


def test_a_cache_that_is_not_fp8_is_not_calibrated(reference):
    assert "kv_cache_dtype" in reference["reference"]["refusal"]


def test_calibration_costs_what_its_prefill_costs(scales):
    cost = scales["cost"]
    if "same pass, not measured" not in cost:
        pytest.skip("the rank is in another process")
    assert cost["measured pass"] <= 1.10 * cost["same pass, not measured"]
    assert cost["calibration"] <= 1.10 * cost["engine's eager prefill"]


def test_two_ranks_measure_what_one_does(ranks):
    for policy, found in ranks[1]["scales"].items():
        others = ranks[2]["scales"][policy]
        assert found.keys() == others.keys()
        worst = max((others[name] / scale - 1 for name, scale in found.items()), key=abs)
        assert abs(worst) <= (0.02 if policy.startswith("calm") else 0.04), f"{policy}: {worst:+.3%}"


def test_scales_survive_sleep(slept):
    for level in ("level 1", "level 2"):
        assert slept[level]["live_scales"] == slept["live_scales"] == slept[level]["live_scales_after_a_nap"]
        assert slept[level]["said"] == slept["said"]
    assert 1.0 not in [value for name, value in slept["live_scales"].items() if "_k_scale" in name]


def test_the_triton_backend_decodes_with_them_too(triton):
    """In SGLang its graphs hold Python numbers, and are captured anew."""
    assert triton["graph_replays"] > 0
    assert 0 < triton["decode_against_prefill"] <= 0.1


def test_write_the_result(reference, scales, independent):
    result = {
        "what": f"{ENGINE}, {SHAPE} shape, FP8 KV cache, {scales['kv']['backend']}, CUDA graphs; error: mean absolute "
        "difference of log-probabilities to a BF16 KV cache",
        "command": command_of("scales"),
        "gpu": scales["gpu"],
        "versions": scales["versions"],
        "backend": scales["kv"]["backend"],
        "errors": scales["errors"],
        "times_smaller": scales["errors"]["outliers 1.0"] / scales["errors"]["outliers calibrated"],
        "maxima_of_keys": [min(maxima_of_keys(scales)), max(maxima_of_keys(scales))],
        "largest_deviation_from_transformers": {
            policy: {
                kind: max(map(abs, deviations(scales["scales"][policy], independent[policy], kind)))
                for kind in sorted({name[-7] for name in scales["scales"][policy]})
            }
            for policy in scales["scales"]
        },
        "decode_against_prefill": scales["decode_against_prefill"],
        "graph_replays": scales["graph_replays"],
        "cached_tokens": scales["cached_tokens"],
        "cost_s": scales["cost"],
        "scales": scales["scales"],
    }
    write_result(f"kv_{ENGINE}_{SHAPE}", result)


def test_write_the_result_of_sleep_ranks_and_backends():
    found, steps = {}, {}
    for name, step in STEPS.items():
        path = WORK / f"{ENGINE}-{name}.json"
        if path.exists():
            found[name], steps[step] = json.loads(path.read_text()), None
    if not found:
        pytest.skip("nothing of it was asked for")
    some = next(iter(found.values()))
    result: dict = {"command": command_of(*steps), "gpu": some["gpu"], "versions": some["versions"]}
    if {"tp1", "tp2"} <= found.keys():
        one, two = (found[name]["scales"] for name in ("tp1", "tp2"))
        result["largest_deviation_of_two_ranks"] = {
            policy: max(abs(two[policy][name] / scale - 1) for name, scale in one[policy].items()) for policy in one
        }
    if "triton" in found:
        result["triton"] = {key: found["triton"][key] for key in ("kv", "graph_replays", "decode_against_prefill")}
    for name in found:
        if name.startswith("sleep"):
            result[name] = {
                level: {
                    "scales_kept": found[name][level]["live_scales"] == found[name]["live_scales"],
                    "same_answers": found[name][level]["said"] == found[name]["said"],
                }
                for level in ("level 1", "level 2")
            }
    write_result(f"kv_{ENGINE}_{SMALL_SHAPE}", result)
