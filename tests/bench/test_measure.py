"""Committed results are measured again by the commands that stand in them."""

import json
import sys

import pytest

from tests.test_pages import load_renderer

MEASURE = load_renderer("measure")
SMALL = "fp8refit bench kernel --shapes 64x64 --dtypes bfloat16 --repeats 3 --device cpu"


def test_a_command_is_run_and_its_result_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["measure", "--out", str(tmp_path), f"small.json={SMALL}"])
    MEASURE.main()
    assert json.loads((tmp_path / "small.json").read_text())["command"] == SMALL
    assert "small.json: exit code 0" in capsys.readouterr().out


def test_what_fails_or_takes_too_long_is_named_and_leaves_no_result(tmp_path, monkeypatch):
    wrong = "wrong.json=fp8refit bench kernel --device nowhere"
    monkeypatch.setattr(sys, "argv", ["measure", "--out", str(tmp_path), wrong])
    with pytest.raises(SystemExit, match="not measured: wrong"):
        MEASURE.main()
    monkeypatch.setattr(sys, "argv", ["measure", "--out", str(tmp_path), f"slow.json={SMALL}", "--timeout-s", "0.1"])
    with pytest.raises(SystemExit, match="not measured: slow"):
        MEASURE.main()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["slow.log", "wrong.log"]
    assert "ended after" in (tmp_path / "slow.log").read_text()


def test_what_an_engine_prints_as_it_ends_is_no_result():
    assert MEASURE.result_in('booting\n{"a": 1}\nbye\n{not it}\n') == {"a": 1}
    assert MEASURE.result_in("") is MEASURE.result_in("bye\n") is None


def test_a_command_that_it_does_not_take_is_said_before_the_first_run(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["measure", "--out", str(tmp_path), f"small.json={SMALL}", "other.json=nox -s demo"]
    )
    with pytest.raises(ValueError, match="no command of fp8refit"):
        MEASURE.main()
    assert list(tmp_path.iterdir()) == []


def test_every_committed_refit_of_the_pages_has_a_command_that_it_takes():
    for name in load_renderer("render_pages").REFITS.values():
        variables, arguments = MEASURE.split(json.loads((MEASURE.RESULTS / name).read_text())["command"])
        assert not variables and arguments[:2] == ["bench", "refit"]


def test_variables_are_set_and_other_programs_are_not_run():
    assert MEASURE.split("A=1 B='x y' fp8refit bench kernel") == ({"A": "1", "B": "x y"}, ["bench", "kernel"])
    for command in ("nox -s kernels", "A=1 python -m pytest", ""):
        with pytest.raises(ValueError, match="no command of fp8refit"):
            MEASURE.split(command)
