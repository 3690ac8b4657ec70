"""SGLang engines updated from within their schedulers, with stubbed kernels. `updates.py` does it."""

import pytest

from tests.engines.update_tests import *  # noqa: F403 - tests

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]


@pytest.fixture(scope="module", params=[("qwen3", 1), ("qwen2_wide", 2)], ids=["one-rank", "two-ranks"])
def found(request, run_engine):
    family, num_ranks = request.param
    return run_engine("updates", family=family, num_ranks=num_ranks)


@pytest.fixture
def drivers(found):
    return [found]


def test_a_cache_that_stays_stops_an_update_before_anything_is_written(found):
    assert [one["error"] for one in found["kept"]] == ["CacheFlushError"] * len(found["kept"])
    assert found["kept same"]
