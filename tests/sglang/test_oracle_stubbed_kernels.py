"""A running SGLang server is attacked while it answers; every token names its policy. What is real here: `conftest.py`."""

import pytest

from tests.oracle.expectations import LENGTH, check

LEAST = {
    "short": {"pushes": 12, "poisoned": 2, "kills": 2, "kills_inside_the_write": 1},
    "long": {"pushes": 12, "poisoned": 3, "kills": 4, "kills_inside_the_write": 3},
}
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(620)]


@pytest.fixture(scope="module")
def found(run_engine):
    """What a campaign found."""
    return run_engine("oracle", within_s=600, length=LENGTH)


def test_no_answer_is_stale_or_mixed_or_of_a_dirty_server(found):
    check(found, least=LEAST[LENGTH])
