"""What a user may configure."""

import math

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from fp8refit import RefitConfig, gathered
from fp8refit.cli import commands as cli


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e12, 86_401, 0, -1])
def test_a_step_takes_a_day_at_most(seconds):
    with pytest.raises(
        ValidationError, match=r"timeout_s\n.*(finite number|less than or equal to 86400|greater than 0)"
    ):
        RefitConfig(timeout_s=seconds)


@pytest.mark.parametrize("seconds", [math.inf, 1e12])
def test_a_step_of_a_gather_takes_a_day_at_most(seconds):
    with pytest.raises(ValueError, match=r"timeout_s is .* a day"):
        gathered({}, timeout_s=seconds)


def test_a_step_may_take_a_day():
    assert RefitConfig(timeout_s=86_400).timeout_s == 86_400


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e12"])
def test_the_command_line_says_how_long_a_step_may_take(seconds, tmp_path):
    said = CliRunner().invoke(cli.app, ["push", str(tmp_path), "--to", "http://127.0.0.1:1", "--timeout-s", seconds])
    assert said.exit_code == 2
    assert "Input should be" in said.output
