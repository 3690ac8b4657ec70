"""SGLang with stubbed kernels keeps every promise that `fp8refit.testing` checks, by `generate` and by `async_generate`.

What is and is not real here: `conftest.py`.
"""

import pytest

from fp8refit.testing import CHECKS, kv_cache, name_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

KV_CACHE = {name.removeprefix("check_") for name in vars(kv_cache) if name.startswith("check_")}
"""SGLang has no FP8 KV cache on a CPU."""
ENGINES = {"generate": "llama", "async_generate": "llama_tied"}
"""The family that stands for each way in."""
CANNOT_BE_BROUGHT_ABOUT = {
    "generate": {*KV_CACHE, "sleeping_weights_are_not_written", "tied_names_may_be_sent_or_not"},
    "async_generate": {*KV_CACHE, "sleeping_weights_are_not_written", "a_busy_engine_is_left_alone"},
}
"""Checks that are skipped, because the engine cannot be brought into the state that they are about."""


@pytest.fixture(scope="module", params=ENGINES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def results(kind, run_engine):
    """Results of all checks on one engine."""
    return {result["name"]: result for result in run_engine("conformance", kind=kind, family=ENGINES[kind])}


@pytest.mark.parametrize("check", map(name_of, CHECKS))
def test_a_promise_is_kept(kind, check, results):
    if check in CANNOT_BE_BROUGHT_ABOUT[kind]:
        assert results[check]["outcome"] == "skipped", results[check]
    else:
        assert results[check]["outcome"] == "passed", results[check]["message"]
