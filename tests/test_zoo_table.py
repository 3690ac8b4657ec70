"""Reasons in the zoo's table: whole first sentences, of whatever an engine wrote before it ended."""

import pytest

from tests.zoo_table import (
    BACKEND,
    NOT_BOOTED,
    REFUSED,
    TABLE,
    WRONG,
    classes_of,
    outcome_of,
    outcomes_of,
    render,
    shortened,
)

REASONS = {
    "no kernel": (
        "NotImplementedError: Sparse Attention is not supported on CPU.",
        "NotImplementedError: Sparse Attention is not supported on CPU",
    ),
    "two sentences": (
        "a\n[rank0]: x.y.RuntimeError: none is there for v1.2. Refusing\n",
        "RuntimeError: none is there for v1.2",
    ),
    "bare": ("AssertionError\nnanobind: leaked", "AssertionError"),
    "on the next line": ("ImportError: \nTimm needs timm. Install it", "ImportError: Timm needs timm"),
    "pydantic": (
        "p.ValidationError: 1 validation error for C\n  Value error, --a needs --b [type=value_error, input_value=X]\n  For",
        "ValidationError: --a needs --b",
    ),
    "ours": (
        "[rank0]: f.InvalidSourceError: cannot be used (2 problems):\n[rank0]:   - q: unexpected; leave it out\n[rank0]:   - k",
        "q: unexpected; leave it out",
    ),
    "a place on the machine": ("OSError: nothing for '/tmp/a-1/b/bf16'. Add", "OSError: nothing for 'bf16'"),
    "out of time": (
        '{"name": "zoo"} ended with -9\nTimeout (0:01:40)!',
        "does not come to an end in the time that a walk gives it",
    ),
    "a refusal": ("cannot be refitted: a: `w`: 4 of 4 are bare. Ask us", "a: `w`: 4 of 4 are bare"),
}


@pytest.mark.parametrize("case", REASONS)
def test_a_reason_is_the_first_sentence_of_the_last_error(case):
    text, reason = REASONS[case]
    assert shortened(text) == reason


def test_what_fp8refit_says_is_a_refusal_and_what_the_engine_says_is_not():
    assert outcome_of({"error": REASONS["ours"][0]}, speaks=True)["outcome"] == REFUSED
    assert outcome_of({"error": REASONS["a refusal"][0]}, speaks=True)["outcome"] == REFUSED
    assert outcome_of({"error": REASONS["no kernel"][0]}, speaks=True)["outcome"] == NOT_BOOTED


@pytest.mark.parametrize(("engine", "at_least"), [("vLLM", 60), ("SGLang", 30)])
def test_enough_model_classes_of_each_engine_equal_a_fresh_boot(engine, at_least):
    assert len(classes_of(engine)) >= at_least
    assert WRONG not in outcomes_of(engine)


def test_models_that_share_a_class_count_once(monkeypatch):
    lines = {"A": BACKEND, "B": BACKEND, "C": "llama.Llama", "D": "bert.Bert"}
    models = {name: {"outcome": "equal", "class": noted} for name, noted in lines.items()}
    models |= {"D": models["D"] | {"outcome": REFUSED}, "E": {"outcome": "equal, without a forward"}}
    monkeypatch.setattr("tests.zoo_table._walk_of", lambda engine: {"models": models})
    assert classes_of("vLLM") == {BACKEND, "llama.Llama", "E"}


def test_the_page_is_what_was_noted():
    assert TABLE.read_text() == render(), "run: python -m tests.zoo_table"
