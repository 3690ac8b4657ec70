"""SGLang engines that draft tokens, with stubbed kernels, refitted together with their drafts against fresh ones.

What is and is not real here: `conftest.py`, `cpu_drafts.py`.
"""

from importlib.metadata import version

import pytest

from tests.engines.draft_tests import *  # noqa: F403 - tests

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

DRAFTING = {"mtp": 2, "latent mtp": 1, "draft_model": 2, "eagle": 1, "eagle3": 2}
"""Methods, and numbers of ranks."""


@pytest.fixture(scope="module", params=DRAFTING)
def method(request):
    if version("sglang") == "0.5.15":
        pytest.skip("0.5.15 moves the KV of drafts by kernels of Triton, on a CPU too")
    return request.param


@pytest.fixture(scope="module")
def drafting(method, run_engine):
    both = run_engine("drafting", method=method, num_ranks=DRAFTING[method])
    return both["found"], both["fresh"]


def test_tokens_that_the_draft_of_the_new_policy_says_are_accepted(method, drafting):
    found, fresh = drafting
    num_accepted = [[one["num_accepted"] for one in each["outputs"]] for each in (fresh, found["before"])]
    assert method != "draft_model" or sum(num_accepted[0]) > sum(num_accepted[1])


def test_the_targets_embedding_may_come_under_the_drafts_name(method, drafting):
    found, fresh = drafting
    assert ("other name" in found) == (method == "eagle")
    assert found.get("other name", fresh) == fresh
