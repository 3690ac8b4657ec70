"""vLLM keeps every promise that `fp8refit.testing` checks, in each place where its engine core may run.

On the CPU, with the tests' own FP8 product: `conftest.py` says what that does not claim.
"""

import pytest

from fp8refit.testing import CHECKS, name_of
from tests.vllm.processes import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

TIMEOUT_S = 220
ENGINES = {
    "LLM in this process": ("LLM", "qwen2", "ue8m0", "0"),
    "LLM in another process": ("LLM", "qwen3", "fp32", "1"),
    "AsyncLLM": ("AsyncLLM", "qwen3", "fp32", "1"),
}
CANNOT_BE_BROUGHT_ABOUT = {
    "LLM in this process": set(),
    "LLM in another process": {
        "sleeping_weights_are_not_written",
        "caches_that_stay",
        "tied_names_may_be_sent_or_not",
        "memory_does_not_grow",
    },
    "AsyncLLM": {
        "a_busy_engine_is_left_alone",
        "sleeping_weights_are_not_written",
        "caches_that_stay",
        "tied_names_may_be_sent_or_not",
        "memory_does_not_grow",
    },
}
"""Checks that are skipped, because the engine cannot be brought into the state that they are about."""


@pytest.fixture(scope="module")
def results(starter, tmp_path_factory):
    """Results of all checks on one kind of engine, which is run when it is first asked for."""
    found = {}

    def of(engine):
        if engine not in found:
            kind, family, kernel, multiprocessing = ENGINES[engine]
            work = tmp_path_factory.mktemp("conformance")
            arguments = {"kind": kind, "family": family, "kernel": kernel, "work": work}
            environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing}
            outcome = run_scenario(
                starter, "conformance", arguments, work, timeout_s=TIMEOUT_S, environment=environment
            )
            found[engine] = {result["name"]: result for result in outcome.drivers[0]}
        return found[engine]

    return of


@pytest.mark.parametrize("check", map(name_of, CHECKS))
@pytest.mark.parametrize("engine", ENGINES)
def test_a_promise_is_kept(engine, check, results):
    result = results(engine)[check]
    if any(name in check for name in CANNOT_BE_BROUGHT_ABOUT[engine]):
        assert result["outcome"] == "skipped", result
    else:
        assert result["outcome"] == "passed", result["message"]
