"""Reasons in the zoo's table: whole first sentences, of whatever an engine wrote before it ended."""

import pytest

from tests.zoo_table import (
    BACKEND,
    EQUAL,
    EXPECTED,
    FAILED,
    LEFT_BEHIND,
    NOT_BOOTED,
    REFUSED,
    SILENT,
    TABLE,
    WRONG,
    Stage,
    classes_of,
    ended,
    outcome_of,
    outcomes_of,
    render,
    shortened,
    unexpected_failures,
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
        "needs more time or memory than a walk has",
    ),
}
LOST = "f.EngineLostError: a rank of the engine is gone (it hung up); restart the engine"
HELD = {"a.weight": "1", "a.weight_scale_inv": "2"}
EQUAL_ENGINES = {"left_behind": [], **{key: [HELD] for key in ("refitted", "from_files", "fresh")}}
EQUAL_ENGINES |= {"before": 1, "generated": 2, "fresh_generated": 2}
"""What a scenario gives whose two engines are alike."""


@pytest.mark.parametrize("case", REASONS)
def test_a_reason_is_the_first_sentence_of_the_last_error(case):
    text, reason = REASONS[case]
    assert shortened(text) == reason


def line_of(error, stage):
    return outcome_of({"error": error, "stage": stage}, speaks=True)


@pytest.mark.parametrize("stage", [Stage.MAKE, Stage.BOOT])
def test_an_engine_that_never_ran_has_not_booted(stage):
    assert line_of(REASONS["no kernel"][0], stage) == {"outcome": NOT_BOOTED, "why": REASONS["no kernel"][1]}


def test_the_reason_says_which_stage_was_killed():
    late = {"outcome": NOT_BOOTED, "why": "making the model: needs more time or memory than a walk has"}
    assert line_of(REASONS["out of time"][0], Stage.MAKE) == late


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage not in (Stage.MAKE, Stage.BOOT)])
@pytest.mark.parametrize("error", [LOST, *(text for text, _ in REASONS.values())])
def test_whatever_ends_an_engine_that_had_booted_is_a_failure(error, stage):
    line = line_of(error, stage)
    assert line == {"outcome": FAILED, "why": f"{stage}: {shortened(error)}"}


def test_an_error_of_fp8refit_while_an_engine_boots_is_a_failure():
    assert line_of(LOST, Stage.BOOT)["outcome"] == FAILED
    assert line_of(REASONS["ours"][0], Stage.BOOT)["outcome"] == FAILED


def test_the_stage_is_the_one_that_was_noted_last(tmp_path):
    notes = tmp_path / "notes"
    for stage in (Stage.BOOT, Stage.REFIT):
        notes.write_text(stage)
    assert ended(RuntimeError("x"), notes) == {"error": "x", "stage": Stage.REFIT}


def test_a_scenario_that_never_began_has_no_outcome(tmp_path):
    with pytest.raises(RuntimeError, match="no process"):
        ended(RuntimeError("no process"), tmp_path / "notes")


def test_what_fp8refit_names_before_it_writes_is_a_refusal():
    refused = {"left_behind": [], "refused": "a: `w`: 4 of 4 are bare. Ask us"}
    assert outcome_of(refused, speaks=True) == {"outcome": REFUSED, "why": "a: `w`: 4 of 4 are bare"}


@pytest.mark.parametrize("found", [EQUAL_ENGINES, {"refused": "a: is bare"}], ids=["equal", "refused"])
def test_a_model_whose_inspection_left_something_behind_is_neither_equal_nor_refused(found):
    line = outcome_of(found | {"left_behind": ["hooks", "rotary", "configs"]}, speaks=True)
    assert line == {"outcome": LEFT_BEHIND, "why": "hooks, rotary"}


def test_two_engines_that_hold_and_say_the_same_are_equal():
    assert outcome_of(EQUAL_ENGINES, speaks=True) == {"outcome": EQUAL, "num_quantized": 1}
    assert outcome_of(EQUAL_ENGINES, speaks=False) == {"outcome": SILENT, "num_quantized": 1}


@pytest.mark.parametrize(
    "changed",
    [
        {"fresh": [HELD | {"a.weight": "3"}]},
        {"from_files": [HELD | {"a.weight": "3"}]},
        {"fresh_generated": 3},
        {"before": 2},
        {"is_quantized_alike": False},
    ],
    ids=["bytes", "bytes from files", "said", "said what it did before", "checkpoint"],
)
def test_engines_that_differ_are_refitted_wrongly(changed):
    assert outcome_of(EQUAL_ENGINES | changed, speaks=True)["outcome"] == WRONG


@pytest.mark.parametrize("outcome", [WRONG, LEFT_BEHIND, FAILED])
def test_a_failure_fails_a_walk_unless_it_is_expected_by_name(outcome, monkeypatch):
    models = {"A": {"outcome": outcome}, "B": {"outcome": outcome}, "C": {"outcome": NOT_BOOTED}}
    monkeypatch.setattr("tests.zoo_table._walk_of", lambda engine: {"models": models})
    monkeypatch.setitem(EXPECTED, ("vLLM", "A"), "vLLM's own loader does it too")
    assert unexpected_failures("vLLM") == {"B": outcome}
    assert unexpected_failures("SGLang") == {"A": outcome, "B": outcome}


@pytest.mark.parametrize(("engine", "at_least"), [("vLLM", 60), ("SGLang", 30)])
def test_enough_model_classes_of_each_engine_equal_a_fresh_boot(engine, at_least):
    assert len(classes_of(engine)) >= at_least
    assert unexpected_failures(engine) == {}


def test_only_failures_are_expected():
    assert all(outcomes_of(engine)[name] in (WRONG, LEFT_BEHIND, FAILED) for engine, name in EXPECTED)


def test_models_that_share_a_class_count_once(monkeypatch):
    lines = {"A": BACKEND, "B": BACKEND, "C": "llama.Llama", "D": "bert.Bert"}
    models = {name: {"outcome": "equal", "class": noted} for name, noted in lines.items()}
    models |= {"D": models["D"] | {"outcome": REFUSED}, "E": {"outcome": "equal, without a forward"}}
    monkeypatch.setattr("tests.zoo_table._walk_of", lambda engine: {"models": models})
    assert classes_of("vLLM") == {BACKEND, "llama.Llama", "E"}


def test_the_page_is_what_was_noted():
    assert TABLE.read_text() == render(), "run: python -m tests.zoo_table"
