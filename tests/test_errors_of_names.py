"""What an error says of many names."""

import time

import pytest

from fp8refit import InvalidSourceError, UnsupportedEngineError
from fp8refit.errors import MISSING, MOST_LINES, UNEXPECTED, by_cause, fold, told
from fp8refit.fill.plan import PlanBuilder
from fp8refit.live.slots import Slot, TensorMeta
from tests.fakes import FakeModel

EXPERTS = [
    f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
    for layer in range(48)
    for expert in range(128)
    for part in ("gate", "up", "down")
]


@pytest.fixture(scope="module")
def slots() -> tuple[Slot, ...]:
    return tuple(FakeModel().slots())


def said(slots, rename) -> list[str]:
    """The lines of the error for a policy with other names."""
    metas = {slot.name: TensorMeta(shape=slot.full_shape, dtype=slot.source_dtype) for slot in slots}
    with pytest.raises(InvalidSourceError) as raised:
        PlanBuilder(slots).plan({rename(name): meta for name, meta in metas.items()})
    return str(raised.value).splitlines()[1:]


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        (
            lambda name: f"actor.{name}",
            '{} of {} unexpected names begin with `actor.` and fit without it; pass rename=("actor.", "")',
        ),
        (
            lambda name: f"base_model.model.{name}",
            "{} of {} unexpected names begin with `base_model.model.` and fit without it; "
            'pass rename=("base_model.model.", "")',
        ),
        (
            lambda name: name.replace("model.", "model.language_model.", 1),
            "{} of {} unexpected names have `language_model.` in them and fit without it; "
            'pass rename=("model.language_model.", "model.")',
        ),
        (
            lambda name: ".base_layer.".join(name.rsplit(".", 1)),
            "{} of {} unexpected names have `base_layer.` in them and fit without it; "
            "pass rename=lambda name: name.replace('.base_layer.', '.')",
        ),
        (
            lambda name: f"{name}.data",
            "{} of {} unexpected names end with `.data` and fit without it; "
            "pass rename=lambda name: name.removesuffix('.data')",
        ),
        (
            lambda name: name.removeprefix("model."),
            "{} of {} missing names begin with `model.` and were sent without it; "
            'pass rename=(("embed_tokens.", "model.embed_tokens."), ("layers.", "model.layers."))',
        ),
    ],
)
def test_what_all_names_have_in_common_is_said_first(rename, expected, slots):
    count = len({slot.name for slot in slots if slot.name.startswith("model.")})
    assert said(slots, rename)[0] == "  - " + expected.format(count, count)


def test_layers_that_are_counted_from_one_are_shifted():
    problems = [f"model.layers.2.{part}: {UNEXPECTED}" for part in "ab"] + [
        f"model.layers.0.{part}: {MISSING}" for part in "ab"
    ]
    assert told(problems)[0] == "layers are shifted: those of number 2 were sent, and those of number 0 are missing"


def test_one_misspelt_name_is_shown_with_the_closest_one():
    """Once for all layers."""
    problems = [f"model.layers.{n}.q_porj.weight: {UNEXPECTED}" for n in range(2)]
    problems += [f"model.layers.{n}.{part}_proj.weight: {MISSING}" for n in range(2) for part in "qk"]
    first, *others = told(problems)
    assert first == (
        "model.layers.0.q_porj.weight is unexpected, and model.layers.0.q_proj.weight is missing: is it misspelt? (2 names)"
    )
    hint = "if the trainer never changes what is missing, name it in keep=, and the engine keeps its values"
    assert others == [f"model.layers.{n}.k_proj.weight: {MISSING}" for n in range(2)] + [hint]


@pytest.mark.parametrize("prefix", ["", "policy."])
def test_a_name_that_is_missing_beside_a_remedy_is_not_kept_silently(prefix):
    """A trainer that forgot one would serve old weights by what it was told."""
    names = [f"layers.{n}.{part}_proj.weight" for n in range(4) for part in "qk"]
    problems = [f"{prefix}{name}: {UNEXPECTED}" for name in names[1:]] if prefix else []
    problems += [f"{name}: {MISSING}" for name in (names if prefix else names[:1])]
    *first, missing, hint = told(problems)
    assert len(first) == len(prefix[:1]) and not any("keep" in line for line in first)
    assert missing == f"{names[0]}: {MISSING}"
    assert hint == "if the trainer never changes what is missing, name it in keep=, and the engine keeps its values"


def test_a_prefix_and_a_misspelt_name_are_told_at_once():
    names = [f"model.layers.{n}.{part}_proj.weight" for n in range(4) for part in "qk"]
    problems = [f"policy.{name.replace('0.q_proj', '0.q_porj')}: {UNEXPECTED}" for name in names]
    assert told(problems + [f"{name}: {MISSING}" for name in names]) == [
        '7 of 8 unexpected names begin with `policy.` and fit without it; pass rename=("policy.", "")',
        f"policy.{names[0].replace('q_proj', 'q_porj')} is unexpected, and {names[0]} is missing: is it misspelt?",
    ]


def test_names_that_are_misspelt_alike_are_told_once():
    problems = [f"model.layers.{n}.attn.{part}_proj.weight: {UNEXPECTED}" for n in range(36) for part in "qo"]
    problems += [f"model.layers.{n}.self_attn.{part}_proj.weight: {MISSING}" for n in range(36) for part in "qo"]
    assert told(problems) == [
        f"model.layers.0.attn.{part}_proj.weight is unexpected, and model.layers.0.self_attn.{part}_proj.weight is missing: "
        "is it misspelt? (36 names)"
        for part in "qo"
    ]


def test_names_of_another_family_are_listed_without_a_guess():
    problems = [f"transformer.h.{n}.attn: {UNEXPECTED}" for n in range(3)] + [
        f"model.layers.{n}.mlp: {MISSING}" for n in range(3)
    ]
    assert told(problems) == problems


def test_many_names_take_few_lines_and_little_time():
    problems = [f"actor.{name}: {UNEXPECTED}" for name in EXPERTS] + [f"{name}: {MISSING}" for name in EXPERTS]
    start_s = time.perf_counter()
    error = InvalidSourceError(problems)
    assert time.perf_counter() - start_s < 5
    assert error.problems == tuple(problems)
    assert str(error).splitlines() == [
        "the source cannot be used (36864 problems):",
        '  - 18432 of 18432 unexpected names begin with `actor.` and fit without it; pass rename=("actor.", "")',
    ]


def test_what_does_not_fold_is_cut():
    problems = [f"{'abcdefghijklmnopqrstuvwxyz'[n]}.weight: has shape [{n}]" for n in range(26)]
    lines = told(problems)
    assert lines[:MOST_LINES] == problems[:MOST_LINES]
    assert lines[MOST_LINES:] == ["... and 6 more lines; `problems` of this error has all 26"]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((3,), "a.3.w: x"),
        ((3, 4, 5), "a.{3..5}.w: x (3 names)"),
        ((1, 5), "a.{1,5}.w: x (2 names)"),
        ((1, 3, 5, 7), "a.{1,3,5,...}.w: x (4 names)"),
    ],
)
def test_numbers_are_folded(numbers, expected):
    assert fold(f"a.{number}.w: x" for number in numbers) == [expected]


def test_few_problems_are_shown_as_they_are():
    problems = [f"model.layers.{n}.weight: is on the meta device" for n in range(MOST_LINES)]
    assert told(problems) == problems


def test_a_cause_is_said_once_for_all_layers():
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    names = [f"model.layers.{layer}.{part}" for layer in range(36) for part in parts]
    error = UnsupportedEngineError(
        "refused:", [f"{name}: its kernel repacks. Choose another" for name in names] + ["head: is odd"]
    )
    assert len(error.reasons) == 145
    folded = ", ".join(f"model.layers.{{0..35}}.{part} (36 names)" for part in parts)
    assert str(error).splitlines() == [
        "refused:",
        f"  - {folded}: its kernel repacks. Choose another",
        "  - head: is odd",
    ]


@pytest.mark.parametrize("reasons", [(), ("no name",), ("one", "two"), ("a: b", "c: d"), ("a: b: c",)])
def test_single_reasons_are_said_as_they_are(reasons):
    assert by_cause(reasons) == list(reasons)


@pytest.mark.parametrize(
    ("name", "sent", "advice"),
    [
        ("model.embed_tokens.weight", "[152064, 64]", "; cut the rows of padding, tensor[:151936]"),
        ("lm_head.weight", "[152064, 64]", "; cut the rows of padding, tensor[:151936]"),
        ("lm_head.weight", "[151000, 64]", ""),
        ("lm_head.weight", "[152064, 32]", ""),
        ("model.layers.0.mlp.up_proj.weight", "[152064, 64]", ""),
    ],
)
def test_rows_of_a_padded_vocabulary_are_to_be_cut(name, sent, advice):
    problem = f"{name}: has shape {sent}, this engine's is [151936, 64]"
    error = InvalidSourceError([problem])
    assert str(error).splitlines()[1] == f"  - {problem}{advice}"
    assert error.problems == (problem,)
    error.tell({name: "theirs"})
    assert str(error).splitlines()[1] == f"  - {problem.replace(name, f'{name} (sent as theirs)')}{advice}"


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_planner_says_it_of_a_padded_vocabulary(name, slots):
    metas = {slot.name: TensorMeta(shape=slot.full_shape, dtype=slot.source_dtype) for slot in slots}
    rows, columns = metas["model.embed_tokens.weight"].shape
    metas[name] = TensorMeta(shape=(rows + 3, columns), dtype=metas["model.embed_tokens.weight"].dtype)
    with pytest.raises(InvalidSourceError, match=rf"cut the rows of padding, tensor\[:{rows}\]"):
        PlanBuilder(slots, aliases={"lm_head.weight": "model.embed_tokens.weight"}).plan(metas)
