"""vLLM engines in every process layout against fresh ones of the same layout: bytes of every rank, tokens, log-probabilities.

The fresh engine loads the block-FP8 checkpoint that `quantize_checkpoint` wrote, in processes into which fp8refit's fill had
not come. `observer.py` reads what every rank holds, in that rank's own worker. On the CPU: `conftest.py` says what that does
not claim.
"""

import pytest

from tests.vllm.layout_runs import CASES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(118)]

NUM_RANKS = {
    "multi-process": 1,
    "tensor parallel": 2,
    "core in process": 2,
    "external launcher": 2,
    "asynchronous": 1,
    "replicas": 2,
}
WITH_FP8_CACHE = ["tensor parallel", "asynchronous", "replicas"]
"""Engines for which vLLM itself sets KV scales to 1.0 after a dummy boot."""
SOURCES = [
    "mapping",
    "safetensors",
    "block-FP8 safetensors",
    "function",
    "one-shot iterator",
    "one-shot iterator with manifest",
    "gathered",
    "fp32",
    "wrapped names",
]
every_layout = pytest.mark.parametrize("layout", CASES)


@every_layout
def test_a_refit_reaches_every_rank(layout, layout_runs):
    lived = layout_runs.lived(layout)
    rounds = [driver["policies"]["rounds"] for driver in lived.drivers]
    assert [[one["version"] for one in found] for found in rounds] == [[1, 2, 3]] * len(rounds)
    assert [[one["ranks"] for one in found] for found in rounds] == [[list(range(NUM_RANKS[layout]))] * 3] * len(rounds)
    assert len(lived.ranks(lambda driver: driver["policies"]["rounds"][1]["live"])) == NUM_RANKS[layout]


@every_layout
def test_every_byte_of_every_rank_equals_that_of_a_fresh_engine(layout, layout_runs):
    refitted = layout_runs.lived(layout).ranks(lambda driver: driver["policies"]["rounds"][1]["live"])
    fresh = layout_runs.fresh(layout).ranks(lambda driver: driver["fresh"]["live"])
    assert all(len(live) > 30 for live in fresh)
    assert refitted == fresh


@every_layout
def test_tokens_and_log_probabilities_equal_those_of_a_fresh_engine(layout, layout_runs):
    refitted = [driver["policies"]["rounds"][1]["outputs"] for driver in layout_runs.lived(layout).drivers]
    fresh = [driver["fresh"]["outputs"] for driver in layout_runs.fresh(layout).drivers]
    assert refitted == fresh


@every_layout
def test_a_policy_comes_back_byte_for_byte(layout, layout_runs):
    for driver in layout_runs.lived(layout).drivers:
        first, second, third = driver["policies"]["rounds"]
        assert first["live"] == third["live"] != second["live"]
        assert first["outputs"] == third["outputs"] != second["outputs"]


@every_layout
def test_tensors_of_every_rank_keep_identity_address_and_layout(layout, layout_runs):
    lived = layout_runs.lived(layout)
    assert all(count > 30 for count in lived.ranks(lambda driver: driver["policies"]["num_tensors"]))
    assert lived.ranks(lambda driver: driver["policies"]["moved"]) == [[]] * NUM_RANKS[layout]


@every_layout
def test_padding_rows_of_the_vocabulary_are_zero_after_a_dummy_boot(layout, layout_runs):
    lived = layout_runs.lived(layout)
    booted = lived.ranks(lambda driver: driver["policies"]["booted"]["padding"])
    refitted = lived.ranks(lambda driver: driver["policies"]["rounds"][0]["padding"])
    assert booted[-1]["num_set"] > 0
    assert [found["num_set"] for found in refitted] == [0] * NUM_RANKS[layout]


@every_layout
def test_every_copy_of_every_kv_scale_is_one_after_a_dummy_boot(layout, layout_runs):
    lived = layout_runs.lived(layout)
    fresh = layout_runs.fresh(layout).ranks(lambda driver: driver["kv_scales"])
    refitted = lived.ranks(lambda driver: driver["policies"]["rounds"][0]["kv_scales"])
    for booted in lived.ranks(lambda driver: driver["policies"]["booted"]["kv_scales"]):
        assert set(booted.values()) != {1.0} or layout in WITH_FP8_CACHE
    assert refitted == fresh
    assert {scale for scales in refitted for scale in scales.values()} == {1.0}


@every_layout
def test_nothing_is_left_on_the_engine_after_success(layout, layout_runs):
    assert [driver["policies"]["traces"] for driver in layout_runs.lived(layout).drivers] == [[]] * CASES[
        layout
    ].num_drivers


@pytest.mark.parametrize("kind", SOURCES)
@every_layout
def test_every_kind_of_source_gives_the_same_bytes(layout, kind, layout_runs):
    lived = layout_runs.lived(layout)
    good = lived.ranks(lambda driver: driver["good"]["live"])
    assert lived.ranks(lambda driver: driver["sources"]["live"][kind]) == good


def test_a_tensor_larger_than_the_bucket_goes_through(layout_runs):
    (driver,) = layout_runs.lived("multi-process").drivers
    assert driver["sources"]["largest_bytes"] > 1 << 20


def test_biases_and_tied_embeddings_are_refitted_under_tensor_parallelism(layout_runs):
    (driver,) = layout_runs.lived("tensor parallel").drivers
    names = {slot["name"] for slot in driver["layout"]["slots"]}
    assert "model.layers.0.self_attn.q_proj.bias" in names
    assert driver["layout"]["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert {slot["scale_format"] for slot in driver["layout"]["slots"]} == {None, "ue8m0"}


def test_a_worker_extension_serves_where_plugins_are_not_loaded(layout_runs):
    (driver,) = layout_runs.fresh("asynchronous").drivers
    first, second = driver["ending"]["states"]
    assert first["live"] != second["live"] == driver["fresh"]["live"]
    assert first["outputs"] != second["outputs"] == driver["fresh"]["outputs"]


def test_an_engine_whose_workers_lack_our_method_is_refused_with_what_to_set(layout_runs):
    (driver,) = layout_runs.fresh("multi-process").drivers
    refusal = driver["ending"]["refit"]
    assert refusal["error"] == "UnsupportedEngineError"
    assert "VLLM_PLUGINS" in refusal["message"]
    assert 'worker_extension_cls="fp8refit_vllm.worker.WorkerExtension"' in refusal["message"]
    assert driver["ending"]["state"] == driver["fresh"]
    assert driver["ending"]["traces"] == []


def test_ranks_hold_boxes_of_tensors_that_are_fused_in_the_checkpoint(layout_runs):
    drivers = layout_runs.lived("external launcher").drivers
    boxes = [
        [
            slot["offset"][0]
            for slot in driver["layout"]["slots"]
            if slot["name"].endswith("0.self_attn.qkv_proj.weight")
        ]
        for driver in drivers
    ]
    assert boxes == [[0, 256, 512], [128, 384, 640]]
