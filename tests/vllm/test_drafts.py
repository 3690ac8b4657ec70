"""Real vLLM engines given checkpoints that hold a draft. A refit ignores what vLLM skips, and writes a draft that it has. On
the CPU.
"""

import pytest

from tests.engines.draft_tests import *  # noqa: F403 - tests
from tests.tiny_models import save_with_draft

pytestmark = pytest.mark.vllm

CASES = [("deepseek_v3", "fp32"), ("glm4_moe", "fp32"), ("qwen3_next", "fp32")]
"""Layers after the last one; the same with experts; and names that begin with `mtp`."""
every_family = pytest.mark.parametrize("family", [family for family, _ in CASES])


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    for family, _ in CASES:
        save_with_draft(family, 2, folder / f"{family}-bf16")
    return folder


@pytest.fixture(scope="module")
def refitted(run_engine, work):
    return run_engine("drafts", cases=CASES, work=work)


@pytest.fixture(scope="module")
def fresh(run_engine, work, refitted):
    return run_engine("fresh drafts", cases=CASES, work=work)


@every_family
def test_a_draft_is_ignored_on_every_way_in(family, refitted):
    found = refitted[family]
    assert len(found["drafts"]) > 10 and len(found["ways"]) == 6
    for way, came in found["ways"].items():
        assert came == {"ignored": found["drafts"], "live": found["live"], "dirty": False}, way


@every_family
def test_a_policy_with_a_draft_is_verified(family, refitted):
    assert refitted[family]["verified"]


@every_family
def test_vllm_boots_the_checkpoint_with_the_draft_to_the_same_bytes(family, refitted, fresh):
    assert fresh[family] == {key: refitted[family][key] for key in ("generated", "live")}


@every_family
def test_a_name_that_belongs_to_no_draft_is_still_an_error(family, refitted):
    for name, error in refitted[family]["wrong"].items():
        assert error["named"] == [f"{name}: unexpected, this engine has no such weight; leave it out"]
    assert not refitted[family]["dirty"]


DRAFTING = [
    ("mtp", "multi-process"),
    ("mtp", "tensor parallel"),
    ("draft_model", "multi-process"),
    ("eagle3", "multi-process"),
]


@pytest.fixture(scope="module", params=DRAFTING, ids=[" ".join(case) for case in DRAFTING])
def case(request):
    return request.param


@pytest.fixture(scope="module")
def drafting(case, run_engine, tmp_path_factory):
    """What an engine with a draft found, and one that boots with the policy."""
    method, layout = case
    work = tmp_path_factory.mktemp("drafting")
    run_engine("save drafting", method=method, work=work)
    found = run_engine("drafting", method=method, layout=layout, work=work)
    return found, run_engine("fresh drafting", method=method, layout=layout, work=work)


@pytest.fixture
def method(case):
    return case[0]
