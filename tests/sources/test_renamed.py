"""A trainer with other names than the engine's: every form of `rename=`, on every way in, and what errors say of it."""

import re
from functools import partial

import pytest
import torch

import fp8refit
from fp8refit import InvalidOptionError, InvalidSourceError, NonFiniteError, RefitConfig, Refitter, gathered
from fp8refit.errors import MISSING, UNEXPECTED, prefixes_for, told
from fp8refit.fill.plan import PlanBuilder
from fp8refit.live.slots import TensorMeta
from fp8refit.sources.renamed import Names, renamed
from fp8refit.sources.row_runs import InPieces, MakesPieces, cut
from fp8refit.sources.source import RandomAccess, as_source
from fp8refit.training.megatron import MegatronNames
from tests.fake_ranks import STATE_DICTS, ClientEntryPoint, Cluster, Drivers, Remote, together
from tests.fakes import FakeEntryPoint, FakeModel, assert_holds, make_policy, unchanged

NORM = "model.layers.0.input_layernorm.weight"
LANGUAGE = "actor.model.language_model."


def as_trainer(policy):
    """The policy under a trainer's names."""
    return {f"actor.{name.replace('model.', 'model.language_model.', 1)}": tensor for name, tensor in policy.items()}


def to_engine(name):
    return name.removeprefix("actor.").replace("language_model.", "")


FORMS = {
    "pairs": (("actor.", ""), ("model.language_model.", "model.")),
    "text": "actor.=,model.language_model.=model.",
    "wrapped prefixes": (("actor.module.", ""), ("model.language_model._orig_mod.", "model.")),
    "function": to_engine,
    "mapping": {name: to_engine(name) for name in as_trainer(make_policy(FakeModel(), seed=1))},
}


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [FakeEntryPoint(), ClientEntryPoint()])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", STATE_DICTS)
def test_every_form_renames_every_source(form, make, model, tmp_path):
    refitter = Refitter(model, rename=FORMS[form])
    for version in (1, 2):
        policy = make_policy(model, seed=version)
        assert refitter.refit(**make(as_trainer(policy), tmp_path)).version == version
        assert_holds(model, policy)
        assert refitter.verify(as_trainer(policy))


@pytest.mark.parametrize("make", STATE_DICTS)
def test_ranks_in_other_processes_get_the_engines_names(make, tmp_path):
    remote = Remote(Cluster("tensor"), rename=FORMS["pairs"])
    for version in (1, 2):
        policy = remote.cluster.make_policy(version)
        remote.refitter.refit(**make(as_trainer(policy), tmp_path))
        remote.cluster.assert_holds(policy, version=version)


def test_a_broadcast_and_an_update_rename_too():
    policy = (cluster := Cluster("tensor")).make_policy(1)
    with fp8refit.Broadcaster([Remote(cluster).client], rename="actor.=,model.language_model.=model.") as broadcaster:
        broadcaster.push(as_trainer(policy))
    cluster.assert_holds(policy, version=1)
    manifest = {name: TensorMeta.of(tensor) for name, tensor in as_trainer(policy).items()}

    def update(client, announced):
        with fp8refit.update(client, manifest=announced, rename=FORMS["pairs"]) as update:
            first, *rest = as_trainer(policy).items()
            update.load([first])
            update.load(gathered(dict(rest)))

    for announced in (None, manifest):
        clients = Drivers(cluster := Cluster("tensor")).clients
        together([partial(update, client, announced) for client in clients])
        cluster.assert_holds(policy, version=1)


@pytest.mark.parametrize("form", ["pairs", "text", "mapping"])
def test_gathered_takes_the_simple_forms(form, model):
    policy = make_policy(model, seed=1)
    with gathered(as_trainer(policy), rename=FORMS[form]) as weights:
        Refitter(model).refit(weights)
    assert_holds(model, policy)


def test_a_scale_follows_its_weight_and_wrappers_are_removed_before_and_after():
    names = Names({"a.weight": "b.weight", "c": "module.d"})
    assert names["a.weight_scale_inv"] == names["module.a.weight_scale"] == "b.weight_scale_inv"
    assert names["c"] == "d"
    assert Names(("actor.", ""))["actor.base_model.model.x.weight"] == "x.weight"


def test_a_name_is_translated_once_and_nothing_happens_without_the_option(model):
    asked = []
    refitter = Refitter(model, rename=lambda name: asked.append(name) or to_engine(name))
    for seed in (1, 2):
        refitter.refit(as_trainer(make_policy(model, seed)))
        assert sorted(asked) == sorted(as_trainer(make_policy(model, seed)))
    source = as_source({})
    assert renamed(source, None) is source
    assert "rename" not in RefitConfig(rename=to_engine).model_dump_json(), "the other side gets the engine's names"


def test_a_source_can_do_what_it_could():
    class Source:
        is_repeatable = True

        def scan(self):
            return {"actor.a": TensorMeta.of(torch.ones(2))}, ()

        def __iter__(self):
            return iter([("actor.a", torch.ones(2))])

    class Able(Source):
        def pick(self, names):
            return {name: torch.ones(2) for name in names}

        def pieces(self, max_bytes):
            return cut("actor.a", torch.ones(2), max_bytes)

        def recipes(self, max_bytes):
            return self.pieces(max_bytes)

        def make(self, recipes, outs):
            assert not recipes

    names = Names("actor.=")
    for source, can in (Source(), False), (Able(), True):
        found = renamed(source, names)
        assert [isinstance(found, kind) for kind in (RandomAccess, InPieces, MakesPieces)] == [can] * 3
        assert list(dict(found)) == list(found.scan()[0]) == ["a"]
    assert (
        list(found.pick(["a"]))
        == [run.name for run in found.pieces(8)]
        == [run.name for run in found.recipes(8)]
        == ["a"]
    )


@pytest.mark.parametrize("make", STATE_DICTS[:4])
def test_two_names_that_become_one_are_both_named(make, model, tmp_path):
    refitter = Refitter(model, rename="actor.=")
    policy = make_policy(model, seed=1)
    with unchanged(model), pytest.raises(InvalidSourceError) as raised:
        refitter.refit(**make(policy | {f"actor.{NORM}": policy[NORM] + 1}, tmp_path))
    (line,) = raised.value.problems
    assert re.fullmatch(
        rf"{NORM}: is made of (actor\.)?{NORM} and of (actor\.)?{NORM}, which rename= makes one; .*", line
    )
    assert line.count("actor.") == 1
    with pytest.raises(InvalidSourceError, match="which rename= makes one"):
        Refitter(model).refit(gathered(policy | {f"actor.{NORM}": policy[NORM]}, rename=("actor.", "")))


def test_errors_speak_of_both_names(model):
    refitter = Refitter(model, rename="actor.=", ignore="critic.*")
    policy = {f"actor.{name}": tensor for name, tensor in make_policy(model, seed=1).items()}
    with unchanged(model), pytest.raises(InvalidSourceError) as raised:
        refitter.refit(policy | {f"actor.{NORM}": torch.ones(3), "actor.odd": torch.ones(1)})
    said = str(raised.value).splitlines()
    assert f"  - {NORM} (sent as actor.{NORM}): has shape [3]" in said[1] + said[2]
    assert f"  - odd (sent as actor.odd): {UNEXPECTED}" in said
    assert {problem.split(":")[0] for problem in raised.value.problems} == {NORM, "odd"}
    policy[f"actor.{NORM}"] = torch.full_like(policy[f"actor.{NORM}"], float("nan"))
    with pytest.raises(NonFiniteError, match=re.escape(f"{NORM} (sent as actor.{NORM})")) as bad:
        refitter.refit(policy)
    assert bad.value.names == (NORM,)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        (5, "rename is 5; pass a pair of prefixes"),
        ("actor.", "rename is 'actor.'"),
        ("a=b=c", "rename is 'a=b=c'"),
        (["a", "b", "c"], "rename is "),
        ({"a": 1}, "rename is {'a': 1}"),
        (MegatronNames(num_query_groups=1, head_dim=1), "takes more than a name; .*gathered"),
    ],
)
def test_what_is_no_renaming_is_refused_at_once(option, match, model):
    with pytest.raises(InvalidOptionError, match=match):
        Refitter(model, rename=option)


def test_a_function_has_to_give_a_name(model):
    with pytest.raises(InvalidSourceError, match=f"{NORM}: the function rename= makes NoneType of it; return a name"):
        Refitter(model, rename=lambda name: name if name != NORM else None).refit(make_policy(model, seed=1))


TEXT = ["model.embed_tokens.weight", "model.norm.weight", *(f"model.layers.{n}.q_proj.weight" for n in range(4))]
VISION = ["model.visual.merger.weight", *(f"model.visual.blocks.{n}.weight" for n in range(8))]
BOTH = [name.replace("model.", "model.language_model.") for name in TEXT] + VISION
OLD = [*TEXT, *(name.removeprefix("model.") for name in VISION)]


@pytest.mark.parametrize(
    ("sent", "needed", "fitting", "expected"),
    [
        ([f"actor.{name}" for name in TEXT], TEXT, TEXT, 'pass rename=("actor.", "")'),
        (
            [name.removeprefix("model.") for name in TEXT],
            TEXT,
            TEXT,
            'pass rename=(("embed_tokens.", "model.embed_tokens."), ("layers.", "model.layers."), ("norm.", "model.norm."))',
        ),
        (
            TEXT,
            BOTH,
            BOTH[: len(TEXT)],
            'pass rename=("model.", "model.language_model.") and keep="model.visual.*" if these never change',
        ),
        (BOTH, TEXT, TEXT, 'pass rename=("model.language_model.", "model.") and ignore="model.visual.*"'),
        (BOTH, OLD, OLD[len(TEXT) :], 'pass rename=("model.visual.", "visual.")'),
        ([f"{name}.data" for name in TEXT], TEXT, TEXT, "pass rename=lambda name: name.removesuffix('.data')"),
        (
            [name.replace("q_proj.", "q_proj.inner.") for name in TEXT[2:]],
            TEXT[2:],
            TEXT[2:],
            "pass rename=lambda name: name.replace('.inner.', '.')",
        ),
    ],
)
def test_an_error_of_names_says_what_to_pass_and_that_works(sent, needed, fitting, expected):
    problems = [f"{name}: {UNEXPECTED}" for name in sent] + [f"{name}: {MISSING}" for name in needed]
    first = next(line for line in told(problems) if "; " in line)
    assert first.endswith(expected)
    options = eval(
        f"dict({expected.removeprefix('pass ').removesuffix(' if these never change').replace(' and ', ', ')})"
    )
    names = Names(options["rename"])
    assert {names[name] for name in (*sent, "lm_head.weight")} >= {*fitting, "lm_head.weight"}


def test_what_is_renamed_already_is_to_be_added():
    problems = [f"a.{name}: {UNEXPECTED}" for name in TEXT] + [f"{name}: {MISSING}" for name in TEXT]
    first = told(problems, {"a.model.norm.weight": "actor.a.model.norm.weight"})[0]
    assert first.endswith('; add ("a.", "") to rename=')


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("actor.model.norm.weight", "actor.="),
        ("norm.weight", "norm.=model.norm."),
        ("model.norm.weight.data", None),
        ("x", None),
    ],
)
def test_one_name_may_say_which_prefix_is_wrong(name, expected):
    assert prefixes_for(name, TEXT) == expected


def test_a_text_models_names_fit_the_language_half_of_a_planned_engine(model):
    """By the planner, with the option that its own error gives."""
    slots = tuple(model.slots())
    metas = {slot.name: TensorMeta(shape=slot.full_shape, dtype=slot.source_dtype) for slot in slots}
    sent = {name.replace("model.", "model.language_model.", 1): meta for name, meta in metas.items()}
    with pytest.raises(InvalidSourceError) as raised:
        PlanBuilder(slots).plan(sent)
    assert 'pass rename=("model.language_model.", "model.")' in str(raised.value)
    names = Names(("model.language_model.", "model."))
    PlanBuilder(slots).plan({names[name]: meta for name, meta in sent.items()})
