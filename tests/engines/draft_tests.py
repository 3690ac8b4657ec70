"""What must come of `drafts.py`. The tests of an engine import these, and have fixtures: `method`, how tokens are drafted, and
`drafting`, what an engine that drafts so found, and one that boots with the policy.
"""

from tests.engines.drafts import FAMILIES, WITHIN

_OWN_COPIES = ["model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"]
IGNORED = {
    "mtp": _OWN_COPIES,
    "latent mtp": _OWN_COPIES,
    "eagle": ["draft.embed_tokens.weight", "draft.lm_head.weight"],
    "eagle3": ["draft.d2t", "draft.t2d"],
}
"""What came under its other name, what loaders skip, and tables of token ids."""
SHARED = {
    **dict.fromkeys(("mtp", "latent mtp", "eagle"), ("embed_tokens.weight", "head.weight")),
    "eagle3": ("embed_tokens.weight",),
}
"""What these have of the target."""
WAYS = ["mapping", "another order", "stream"]


def test_an_engine_and_its_draft_equal_fresh_ones_on_every_way_in(method, drafting):
    found, fresh = drafting
    assert found["before"]["live"] != fresh["live"]
    for way in [*WAYS, *(["folder"] if method in FAMILIES else [])]:
        assert {key: found[way][key] for key in ("live", "outputs")} == fresh, way
        assert found[way]["kept"] == []
        assert found[way]["ignored"] == IGNORED.get(method, [])


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
    assert refused["named"] and all(line.startswith(("draft.", WITHIN)) for line in refused["named"])
    assert found["untouched"]["live"] == found["mapping"]["live"]


def test_a_draft_that_is_to_be_kept_is_kept_beside_another_policy(method, drafting):
    found, fresh = drafting
    assert found["kept"]["kept"] and set(found["kept"]["kept"]) <= set(found["drafts"])
    for rank, (held, before) in enumerate(zip(found["kept"]["live"], fresh["live"], strict=True)):
        draft = {name for name in held if name.startswith("draft: ")}
        ends = SHARED.get(method, ())
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
