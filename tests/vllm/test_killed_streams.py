"""A rank that dies in the middle of a stream, or of an update: no hang, no mixture, and an engine that says that it is lost.

On the CPU: `conftest.py` says what that does not claim. `killed.py` does it.
"""

import pytest

from tests.tiny_models import save_model
from tests.vllm.processes import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(150)]

CASES = {
    "first tensor of a stream to two ranks": ("tensor parallel", "qwen2_wide", "1", "stream", 0),
    "middle of a stream to two ranks": ("tensor parallel", "qwen2_wide", "1", "stream", 12),
    "middle of a stream to an AsyncLLM": ("asynchronous", "qwen3", "1", "stream", 12),
    "middle of a stream to two ranks of a core in this process": ("core in process", "qwen2_wide", "0", "stream", 12),
    "second bucket of an update of two ranks": ("tensor parallel", "qwen2_wide", "1", "update", 1),
}


@pytest.fixture(scope="module", params=CASES)
def outcome(request, starter, tmp_path_factory):
    layout, family, multiprocessing, way, place = CASES[request.param]
    folder = tmp_path_factory.mktemp("killed")
    save_model(family, 1, folder / "bf16")
    arguments = {"layout": layout, "family": family, "model": folder / "bf16", "way": way, "place": place}
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing, "FP8REFIT_TEST_START_METHOD": "fork"}
    outcome = run_scenario(starter, "killed", arguments, folder, timeout_s=140, environment=environment)
    return way, outcome


@pytest.fixture
def found(outcome):
    return outcome[1].drivers[0]


def test_it_is_told_in_time(outcome, found):
    assert found["before"]
    assert found["lost"]["seconds"] < 30
    if outcome[0] == "stream":
        assert found["lost"]["error"] == "EngineLostError"
        assert "restart the engine" in found["lost"]["message"]


def test_later_refits_say_so(found):
    assert found["again"]["error"] == "EngineLostError"
    assert found["again"]["seconds"] < 30


def test_nothing_is_generated_by_parts_of_two_policies(found):
    assert found["generate"] is not None
    assert found["generate"]["seconds"] < 5


def test_nothing_is_left(outcome, found):
    assert found["close"] is None or found["close"]["error"] == "EngineLostError"
    assert outcome[1].left == []
