"""Refitted vLLM engines whose ranks hold layers, not slices, against fresh ones. On the CPU."""

import pytest

from fp8refit.checkpoint import quantize_checkpoint
from tests.tiny_models import save_model
from tests.vllm.processes import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(118)]

FAMILY = "llama_tied"
"""The first rank and the last both hold the embeddings."""


@pytest.fixture(scope="module")
def engines(starter, tmp_path_factory):
    """What the ranks of a refitted engine hold and say, and those of a fresh one."""
    work = tmp_path_factory.mktemp("pipeline")
    bf16, fp8 = work / "bf16", work / "fp8"
    save_model(FAMILY, 2, bf16)
    quantize_checkpoint(bf16, fp8)

    def run(model, *, is_refitted):
        asked = {
            "layout": "pipeline parallel",
            "family": FAMILY,
            "model": model,
            "options": {},
            "is_refitted": is_refitted,
        }
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        (found,) = run_scenario(starter, "expert ranks", asked, work, timeout_s=110, environment=environment).drivers
        return found

    return run(bf16, is_refitted=True), run(fp8, is_refitted=False)


def test_every_byte_of_every_rank_equals_that_of_a_fresh_engine(engines):
    refitted, fresh = engines
    first, last = fresh["live"]
    embeddings = "model.embed_tokens.weight"
    assert first.keys() & last.keys() == {embeddings}
    assert first[embeddings] == last[embeddings]
    assert refitted["live"] == fresh["live"] == refitted["live_from_stacks"]


def test_ranks_say_what_those_of_a_fresh_engine_say(engines):
    refitted, fresh = engines
    assert refitted["outputs"] == fresh["outputs"]
