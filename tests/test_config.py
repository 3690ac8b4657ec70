"""What a user may configure."""

import asyncio
import inspect
import math
import re
from typing import Unpack

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

import fp8refit
from fp8refit import Broadcaster, InvalidOptionError, RefitConfig, Refitter, gathered
from fp8refit.checkpoint import push_checkpoint
from fp8refit.cli import commands as cli
from fp8refit.config import Options
from tests.fake_ranks import ClientEntryPoint, Cluster, Remote


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


FIELDS = {field.alias or name for name, field in RefitConfig.model_fields.items()}


def test_an_editor_knows_every_option():
    assert Options.__annotations__.keys() == FIELDS
    listed = inspect.getdoc(Refitter).partition("**options:")[2].partition("Raises:")[0]
    assert set(re.findall(r"`(\w+)`", listed)) - {"RefitConfig"} == FIELDS
    for call in (Refitter.__init__, Broadcaster.__init__, fp8refit.refit, fp8refit.update):
        assert inspect.signature(call).parameters["options"].annotation == Unpack[Options]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"bucket_byte": 1 << 30}, "no option `bucket_byte`; did you mean `bucket_bytes`?"),
        ({"validate_values": "off"}, "no option `validate_values`; did you mean `validate`?"),
        ({"collective": {"hots": "x"}}, "no option `collective.hots`; did you mean `collective.host`?"),
        ({"xyzzy": 1}, f"no option `xyzzy`; there are {', '.join(Options.__annotations__)}"),
        ({"bucket_bytes": 5}, "`bucket_bytes` is 5: Input should be greater than or equal to 1048576"),
        ({"kv": {"margin": -1}}, "`kv.margin` is -1: Input should be greater than 0"),
        ({"manifest": {}}, "no option `manifest`; pass it with the policy, as in refit(policy, manifest=...)"),
        ({"rename": 5}, "`rename` is 5: rename is 5; pass a pair of prefixes"),
        ({"keep": 5, "ignor": 1}, "no option `ignor`; did you mean `ignore`?"),
    ],
)
def test_a_wrong_option_is_our_error_with_the_closest_one(options, expected):
    calls = [Refitter, lambda _, **options: push_checkpoint("", [], **options)]
    if options.keys() != {"manifest"}:
        calls += [fp8refit.update, lambda engine, **options: fp8refit.refit(engine, {}, **options)]
    for call in calls:
        with pytest.raises(InvalidOptionError) as raised:
            call(None, **options)
        assert any(line.startswith(expected) for line in str(raised.value).splitlines()), raised.value
    with pytest.raises(InvalidOptionError):
        Broadcaster([], **options)


@pytest.fixture
def clients(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])


CALLS = [(Refitter, name) for name in ("refit", "calibrate", "verify")] + [(Broadcaster, "push")]


@pytest.mark.parametrize(("owner", "name"), [(owner, name + end) for owner, name in CALLS for end in ("", "_async")])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rename": "a="}, "`rename` is an option, which this call does not take: pass {}(..., rename=...)"),
        ({"config": None}, "`config` is an option, which this call does not take: pass {}(..., config=...)"),
        ({"keeps": "*"}, "no argument `keeps`; did you mean {}(..., keep=...)?"),
        ({"xyzzy": 1, "ignore": "*"}, "no argument `xyzzy`; there are {}\n`ignore` is an option, "),
    ],
)
def test_an_option_of_one_call_is_our_error_that_says_where_it_goes(owner, name, given, expected, clients):
    remote = Remote(Cluster("alone"))
    maker = remote.refitter if owner is Refitter else Broadcaster([remote.client])
    call = getattr(maker, name)
    *taken, _ = inspect.signature(call).parameters
    with pytest.raises(InvalidOptionError) as raised:
        found = call({}, **given)
        if inspect.iscoroutine(found):
            asyncio.run(found)
    assert str(raised.value).startswith(expected.format(", ".join(taken) if "xyzzy" in given else owner.__name__))


def test_a_misspelt_argument_is_our_error_with_the_closest_one(clients):
    with pytest.raises(InvalidOptionError, match=r"^no argument `manifests`; did you mean `manifest`\?$"):
        Remote(Cluster("alone")).refitter.verify({}, manifests={})


@pytest.mark.parametrize("given", [{}, {"keep": "*norm*"}, {"keep": ["*norm*", "lora.*"]}])
def test_adapters_are_always_kept(given):
    assert RefitConfig(**given).keep == (*(["*norm*"] if given else []), "lora.*")
