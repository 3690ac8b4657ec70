"""A running vLLM server is attacked while it answers; every token names its policy. What is real here: `conftest.py`."""

import pytest

from tests.oracle.expectations import LENGTH, check

LEAST = {
    "short": {"pushes": 16, "poisoned": 2, "kills": 3, "kills_inside_the_write": 2},
    "long": {"pushes": 16, "poisoned": 4, "kills": 6, "kills_inside_the_write": 4},
}
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(620)]


@pytest.fixture(scope="module")
def found(run_engine, tmp_path_factory):
    """What a campaign found."""
    return run_engine("oracle", within_s=600, length=LENGTH, work=tmp_path_factory.mktemp("oracle"))


def test_no_answer_is_stale_or_mixed_or_of_a_dirty_server(found):
    check(found, least=LEAST[LENGTH])
