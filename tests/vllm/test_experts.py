"""Refitted vLLM engines of mixtures of experts against fresh ones: bytes, tokens, log-probabilities. On the CPU.

The product over experts is the tests' own (`cpu_experts.py`). The layouts are those of vLLM's backends on Hopper, made by
vLLM's own post-processing: as loaded (Triton), in powers of two (DeepGEMM), up above gate (FlashInfer).
"""

import pytest

from fp8refit.checkpoint import quantize_checkpoint
from tests.tiny_models import save_model
from tests.vllm.processes import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

CASES = [
    ("qwen3_moe", "fp32"),
    ("qwen3_moe", "ue8m0"),
    ("qwen2_moe", "up first"),
    ("glm4_moe", "ue8m0"),
    ("mixtral", "fp32"),
    ("qwen3_moe", "fp32+compressed-tensors"),
    ("glm4_moe", "ue8m0+compressed-tensors"),
]
RELOADED = [("qwen3_moe", "ue8m0"), ("qwen2_moe", "up first")]
NAMES = [f"{family}-{kernel}" for family, kernel in CASES]
BACKENDS = {"fp32": ("TRITON", "fp32"), "ue8m0": ("DEEPGEMM", "ue8m0"), "up first": ("FLASHINFER_CUTLASS", "fp32")}
SOURCES = [
    "expert by expert, files",
    "expert by expert, FP8 files",
    "rows and columns swapped",
    "rows and columns swapped, strided",
    "one-shot iterator",
    "float32",
    "FP8 stacks",
]
SPLITS = {"tensor parallel": {}, "expert parallel": {"enable_expert_parallel": True}}
SPLIT_FAMILY = "glm4_moe"
every_split = pytest.mark.parametrize("split", SPLITS)
every_case = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    for family in {family for family, _ in CASES}:
        save_model(family, 2, folder / f"{family}-bf16")
    return folder


@pytest.fixture(scope="module")
def refitted(run_engine, work):
    return run_engine("experts", cases=CASES, work=work)


@pytest.fixture(scope="module")
def fresh(run_engine, work, refitted):
    return run_engine("fresh experts", cases=CASES, reloaded=RELOADED, work=work)


@every_case
def test_every_byte_equals_that_of_a_fresh_engine(name, refitted, fresh):
    assert len(fresh[name]["live"]) > 30
    assert refitted[name]["live"] == fresh[name]["live"]


@every_case
def test_every_expert_is_that_of_the_policy(name, refitted):
    assert refitted[name]["wrong"] == []


def test_experts_that_an_engine_quantized_as_it_loaded_them_are_refitted(refitted):
    found = refitted["online"]
    assert (found["wrong"], found["num_layers"], found["formats"]) == ([], 2, ["fp32_floored"])
    assert found["live"] == found["own"]


@every_case
def test_tokens_and_log_probabilities_equal_those_of_a_fresh_engine(name, refitted, fresh):
    assert refitted[name]["generated"] == fresh[name]["generated"]
    assert refitted[name]["generated"]["outputs"] != refitted[name]["before"]["outputs"]


@pytest.mark.parametrize("kind", SOURCES)
@every_case
def test_every_form_of_experts_gives_the_same_bytes(name, kind, refitted):
    assert refitted[name]["sources"][kind] == refitted[name]["live"]


@every_case
def test_the_layout_says_backend_and_scale_format_of_experts(name, refitted):
    slots = [slot for slot in refitted[name]["layout"]["slots"] if ".experts." in slot["name"]]
    assert {(slot["kernel"], slot["scale_format"]) for slot in slots} == {
        BACKENDS[name.partition("-")[2].partition("+")[0]]
    }
    assert refitted[name]["layout"]["refusals"] == []
    assert {slot["dtype"] for slot in slots} == {"float8_e4m3fn"}


def test_what_corrects_a_routers_choices_stays_float32(refitted):
    slots = {slot["name"]: slot["dtype"] for slot in refitted["glm4_moe-ue8m0"]["layout"]["slots"]}
    assert slots["model.layers.1.mlp.gate.e_score_correction_bias"] == "float32"
    assert refitted["glm4_moe-ue8m0"]["bfloat16_corrections"]


@pytest.mark.parametrize("name", [f"{family}-{kernel}" for family, kernel in RELOADED])
def test_a_refit_after_the_engines_own_reload_reaches_the_scales_that_it_reads(name, fresh):
    found = fresh[name]
    assert found["orphans"][0] == 0 < found["orphans"][1]
    assert found["reloaded"] == found["live"]
    assert found["reloaded_generated"]["outputs"] == found["generated"]["outputs"] != found["refitted"]["outputs"]
    assert found["refitted_again"]["outputs"] == found["refitted"]["outputs"]


@pytest.fixture(scope="module")
def ranks(starter, work):
    """What engines of two ranks hold: refitted ones and, in other processes, fresh ones; in processes of the ranks' own too."""
    bf16, fp8 = work / f"{SPLIT_FAMILY}-bf16", work / f"{SPLIT_FAMILY}-fp8"
    quantize_checkpoint(bf16, fp8)

    def run(split, layout, *, is_refitted, num_drivers):
        asked = {"layout": layout, "family": SPLIT_FAMILY, "options": SPLITS[split], "is_refitted": is_refitted}
        asked["model"] = bf16 if is_refitted else fp8
        return run_scenario(starter, "expert ranks", asked, work, timeout_s=110, num_drivers=num_drivers)

    refitted, fresh = (
        {split: run(split, "external launcher", is_refitted=is_refitted, num_drivers=2) for split in SPLITS}
        for is_refitted in (True, False)
    )
    return refitted, fresh, run("expert parallel", "core in process", is_refitted=True, num_drivers=1)


def live_of(outcome):
    return outcome.ranks(lambda driver: driver["live"])


@pytest.fixture(scope="module", params=[False, True], ids=["tensor parallel", "expert parallel"])
def replicas(request, starter, work, ranks):
    """What replicas hold that share experts: refitted ones, and fresh ones."""
    found = []
    for is_refitted in (True, False):
        asked = {"layout": "replicas", "family": SPLIT_FAMILY, "options": {"enable_expert_parallel": request.param}}
        asked |= {"is_refitted": is_refitted, "model": work / f"{SPLIT_FAMILY}-{'bf16' if is_refitted else 'fp8'}"}
        found.append(run_scenario(starter, "expert ranks", asked, work, timeout_s=180))
    return found


expert_parallel = pytest.mark.parametrize("replicas", [True], ids=["expert parallel"], indirect=True)


def test_every_byte_of_replicas_that_share_experts_equals_that_of_fresh_ones(replicas):
    refitted, fresh = replicas
    first, last = live_of(refitted)
    assert first != last
    assert [first, last] == live_of(fresh) == refitted.ranks(lambda driver: driver["live_from_stacks"])


@expert_parallel
@pytest.mark.parametrize("mode", ["wait", "abort", "keep", "continue"])
def test_replicas_that_share_experts_are_refitted_while_they_answer(mode, replicas):
    (driver,) = replicas[0].drivers
    found = driver["in flight"][mode]
    assert (found["stuck"], found["refit"], found["dirty"]) == (0, None, False)
    assert found["num_interrupted"] == (0 if mode == "wait" else 2)
    assert {request["reason"] for request in found["running"]} == {"abort" if mode == "abort" else "length"}
    assert found["late"]["tokens"] == driver["outputs"][2]["tokens"]


@expert_parallel
def test_requests_to_replicas_that_share_experts_go_on_if_waiting_for_them_takes_too_long(replicas):
    (driver,) = replicas[0].drivers
    slow = driver["too slow"]
    assert slow["refit"]["error"] == "EngineBusyError"
    assert {request["reason"] for request in (*slow["running"], slow["late"])} == {"length"}
    assert slow["untouched"] and not slow["dirty"] and slow["traces"] == []


@expert_parallel
@pytest.mark.parametrize("at", range(2))
def test_replicas_that_share_experts_do_not_stay_paused_by_a_refit_that_was_cancelled(at, replicas):
    (driver,) = replicas[0].drivers
    found = driver["cancelled"][at]
    assert found["cancelled"]
    assert not found["paused"]
    assert found["tokens"] == driver["outputs"][2]["tokens"]


def test_replicas_that_share_experts_say_what_fresh_ones_say(replicas):
    refitted, fresh = replicas
    assert [driver["outputs"] for driver in refitted.drivers] == [driver["outputs"] for driver in fresh.drivers]


@every_split
def test_every_byte_of_every_rank_equals_that_of_a_fresh_engine(split, ranks):
    refitted, fresh, _ = ranks
    first, last = live_of(refitted[split])
    assert first != last
    assert [first, last] == live_of(fresh[split])
    assert [first, last] == refitted[split].ranks(lambda driver: driver["live_from_stacks"])


@every_split
def test_ranks_say_what_those_of_a_fresh_engine_say(split, ranks):
    said, expected = ([driver["outputs"] for driver in engines[split].drivers] for engines in ranks[:2])
    assert said == expected


def test_ranks_in_processes_of_their_own_are_given_their_parts_of_stacks(ranks):
    refitted, _, apart = ranks
    assert live_of(apart) == live_of(refitted["expert parallel"])
    assert live_of(apart) == apart.ranks(lambda driver: driver["live_from_stacks"])


def test_a_broadcast_of_stacks_brings_each_rank_its_own_experts_in_fp8(ranks):
    (found,) = ranks[2].drivers
    assert found["is_broadcast"]
    assert found["dtypes"] == ["float8_e4m3fn"]
    assert found["num_ranks_of_experts"] == [1] * 4 * 3


def test_a_rank_has_slots_for_its_own_experts(ranks):
    refitted, _, apart = ranks
    counts = {split: [driver["num_slots"] for driver in found.drivers] for split, found in refitted.items()}
    assert counts == {"tensor parallel": [4 * 3] * 2, "expert parallel": [2 * 3] * 2}
    assert [driver["num_slots"] for driver in apart.drivers] == [4 * 3]
