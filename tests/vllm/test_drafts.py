"""Real vLLM engines given checkpoints that hold a draft. A refit ignores what vLLM skips, and writes a draft that it has. On
the CPU.
"""

import pytest

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
IGNORED = {
    "mtp": ["model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"],
    "eagle3": ["draft.d2t", "draft.t2d"],
    "draft_model": [],
}
"""What came under its other name, and tables of token ids."""
SHARED = {"mtp": ("embed_tokens.weight", "head.weight"), "eagle3": ("embed_tokens.weight",), "draft_model": ()}
"""What these have of the target."""
WAYS = ["mapping", "another order", "stream"]


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


def test_an_engine_and_its_draft_equal_fresh_ones_on_every_way_in(case, drafting):
    found, fresh = drafting
    assert found["before"]["live"] != fresh["live"]
    for way in [*WAYS, *(["folder"] if case[0] == "mtp" else [])]:
        assert {key: found[way][key] for key in ("live", "outputs")} == fresh, way
        assert found[way]["kept"] == []
        assert found[way]["ignored"] == IGNORED[case[0]]


def test_a_name_that_neither_has_is_an_error_beside_a_draft_too(drafting):
    found, _ = drafting
    for name, error in found["wrong"].items():
        assert error["named"] == [f"{name}: unexpected, this engine has no such weight; leave it out"]


def test_a_draft_is_verified(drafting):
    found, _ = drafting
    assert found["verified"]
    assert found["differs"] == [found["name"]]


def test_a_policy_without_the_draft_is_refused_and_changes_nothing(drafting):
    found, _ = drafting
    refused = found["missing"]
    assert refused["error"] == "InvalidSourceError" and "missing" in refused["message"]
    assert all(name.split(":")[0].startswith(("draft.", "model.layers.2.")) for name in refused["named"])
    assert found["untouched"]["live"] == found["mapping"]["live"]


def test_a_draft_that_is_to_be_kept_is_kept_beside_another_policy(case, drafting):
    found, fresh = drafting
    assert found["kept"]["kept"] and set(found["kept"]["kept"]) <= set(found["drafts"])
    for rank, (held, before) in enumerate(zip(found["kept"]["live"], fresh["live"], strict=True)):
        draft = {name for name in held if name.startswith("draft: ")}
        ends = SHARED[case[0]]
        shared = {name for name in draft if ends and name.endswith(ends)}
        changed = {name for name in draft if held[name] != before[name]}
        assert changed == shared, rank
        assert any(held[name] != before[name] for name in held.keys() - draft)


def test_nan_in_a_draft_makes_the_engine_dirty_and_the_next_policy_heals_it(drafting):
    found, fresh = drafting
    bad = found["bad"]
    assert bad["error"]["error"] == "NonFiniteError" and found["name"] in bad["error"]["message"]
    assert bad["dirty"]
    assert {key: bad[key] for key in ("live", "outputs")} == fresh
