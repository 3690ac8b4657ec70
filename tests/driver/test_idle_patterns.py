"""Patterns of `keep=` and `ignore=`, and names and prefixes of `rename=`, that match nothing are said, once."""

import logging
from functools import partial

import pytest
import torch

import fp8refit
from fp8refit import Broadcaster, Refitter
from fp8refit.driver.drop_in import DropIn, DropInOptions
from tests.fake_ranks import NORM, STATE_DICTS, ClientEntryPoint, Cluster, Drivers, Remote, together
from tests.fakes import FakeEntryPoint, make_policy

EXTRA = {"value.weight": torch.ones(2)}
EMBED = "model.embed_tokens.weight"
OPTIONS = {
    "keep": ("*nrom*", NORM),
    "ignore": ("critic.*", "critc.*"),
    "rename": (("critc.", "critic."), ("value.", "critic.")),
}
SAID = [
    'ignore="critc.*" matches nothing: no such name was sent, or the engine needs it',
    'keep="*nrom*" matches nothing: the engine has no such weight, or it was sent',
    'rename=("critc.", "critic.") matches nothing: no name that was sent begins with it',
]


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [FakeEntryPoint(), ClientEntryPoint()])


def without(policy, *names):
    return {name: tensor for name, tensor in policy.items() if name not in names}


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("make", STATE_DICTS)
def test_each_is_said_once_to_whoever_drives_ranks_elsewhere(make, caplog, tmp_path):
    remote = Remote(Cluster("tensor"), **OPTIONS)
    for seed in (1, 2):
        remote.refitter.refit(**make(without(remote.cluster.make_policy(seed), NORM) | EXTRA, tmp_path))
        assert warnings_of(caplog) == SAID


def test_each_is_said_once_by_a_broadcast(caplog):
    reports = []
    with Broadcaster([Remote(cluster := Cluster("tensor")).client], on_refit=reports.append, **OPTIONS) as broadcaster:
        for seed in (1, 2):
            broadcaster.push(without(cluster.make_policy(seed), NORM) | EXTRA)
            assert warnings_of(caplog) == SAID
    assert [report.version for report in reports] == [1, 2]


def test_refits_in_one_line_say_it_once_too(caplog):
    (client,) = Drivers(cluster := Cluster("alone")).clients
    for seed in (1, 2):
        fp8refit.refit(client, without(cluster.make_policy(seed), NORM) | EXTRA, **OPTIONS)
        fp8refit.refit(client, iter((without(cluster.make_policy(seed), NORM) | EXTRA).items()), **OPTIONS)
        assert warnings_of(caplog) == SAID


def test_a_tensor_that_is_kept_by_its_other_name_is_kept(model, caplog):
    policy = without(make_policy(model, seed=1), EMBED)
    report = Refitter(model, keep="lm_head.weight").refit(policy)
    assert report.kept == (EMBED,)
    assert warnings_of(caplog) == []


def test_the_drop_in_says_it_on_every_rank_and_nothing_without_patterns(caplog):
    cluster = Cluster("tensor")
    clients = Drivers(cluster).clients
    for options, expected in (({}, []), (OPTIONS, SAID)):
        made = [
            partial(DropIn, client, rank, DropInOptions(**options), logging.getLogger("tests.drop_in"))
            for client, rank in zip(clients, cluster.ranks, strict=True)
        ]
        drop_ins = together(made)
        for seed in (3, 4):
            policy = cluster.make_policy(seed)
            items = list((without(policy, NORM) if options else policy).items())
            items[1:1] = EXTRA.items() if options else ()
            for pair in (*items[:1], *items):  # the first one comes again, as it was
                together([partial(drop_in.load, [pair]) for drop_in in drop_ins])
        assert sorted(warnings_of(caplog)) == sorted(expected * len(clients))


def test_an_engine_in_this_process(model, caplog):
    refitter = Refitter(model, keep="*nrom*", ignore="critc.*", rename=("critc.", "critic."))
    for seed in (1, 2):
        refitter.refit(make_policy(model, seed))
        assert warnings_of(caplog) == SAID


def test_names_to_rename_that_were_not_sent_are_folded_and_said_once(model, caplog):
    others = {f"layers.{n}.odd": "odd" for n in range(3)} | {"actor.odd.weight": "odd"}
    refitter = Refitter(model, rename={"actor.embed.weight": EMBED} | others)
    for seed in (1, 2):
        policy = make_policy(model, seed)
        refitter.refit({"actor.embed.weight": policy.pop(EMBED)} | policy)
        assert warnings_of(caplog) == [
            'rename="layers.{0..2}.odd (3 names)" matches nothing: no such name was sent',
            'rename="actor.odd.weight" matches nothing: no such name was sent',
        ]


def test_nothing_is_said_of_a_function_and_of_what_is_renamed_in_turn(model, caplog):
    policy = {name.replace("model.", "actor.model."): tensor for name, tensor in make_policy(model, seed=1).items()}
    for rename in (lambda name: name.removeprefix("actor."), "actor.=policy.,policy.="):
        refitter = Refitter(model, rename=rename)
        assert refitter.refit(policy).is_first
        refitter.close()
    assert warnings_of(caplog) == []
