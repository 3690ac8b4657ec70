"""A running vLLM server is attacked while it answers; every token names its policy. What is real here: `conftest.py`."""

import pytest

from tests.oracle.expectations import check

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(620)]


@pytest.fixture(scope="module")
def found(run_engine, tmp_path_factory):
    """What a campaign found."""
    return run_engine("oracle", within_s=600, work=tmp_path_factory.mktemp("oracle"))


def test_no_answer_is_stale_or_mixed_or_of_a_dirty_server(found):
    check(found, least={"pushes": 16, "poisoned": 4, "kills": 6, "kills_inside_the_write": 4})
