"""What an engine holds against a policy: every kind of source, bytes that differ on one rank, and nothing changed."""

from functools import partial

import pytest
import torch

from fp8refit import RefitReport, UnsupportedEngineError
from fp8refit.errors import EngineAsleepError, InvalidSourceError, NonFiniteError
from tests.fake_ranks import (
    K_PROJ,
    NORM,
    O_PROJ,
    STATE_DICTS,
    UP_PROJ,
    ClientEntryPoint,
    Cluster,
    Drivers,
    Remote,
    as_mapping,
    together,
)

OPTIONS = {"bucket_bytes": 1 << 20}


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])


class Engine:
    """Ranks beside their drivers, or elsewhere, that hold a policy."""

    def __init__(self, place, layout="tensor"):
        self.cluster = Cluster(layout)
        remote = Remote(self.cluster, **OPTIONS) if place == "elsewhere" else None
        self.refitters = [remote.refitter] if remote else Drivers(self.cluster, **OPTIONS).refitters
        self.policy = self.cluster.make_policy(1)
        assert all(
            isinstance(report, RefitReport) for report in self.each("refit", lambda: {"state_dict": self.policy})
        )

    def each(self, method, make_arguments):
        return together([partial(getattr(refitter, method), **make_arguments()) for refitter in self.refitters])

    def verify(self, make_arguments):
        """What all drivers are told alike, and that nothing changed."""
        before, states = self.cluster.live_bytes(), self.cluster.states
        found = self.each("verify", make_arguments)
        assert self.cluster.live_bytes() == before
        assert self.cluster.states == states
        assert len({str(one) for one in found}) == 1, found
        return found[0]


@pytest.fixture(params=["here", "elsewhere"])
def engine(request):
    return Engine(request.param)


@pytest.mark.parametrize("place", ["here", "elsewhere"])
@pytest.mark.parametrize("layout", ["tensor", "pipeline", "experts in parts"])
@pytest.mark.parametrize("as_source", STATE_DICTS)
def test_a_policy_that_is_held_does_not_differ(as_source, layout, place, tmp_path):
    engine = Engine(place, layout)
    report = engine.verify(lambda: as_source(engine.policy, tmp_path))
    assert report.is_equal, report
    assert report.version == 1
    assert report.num_tensors == len(engine.policy)
    assert engine.verify(lambda: as_source(engine.policy, tmp_path)).is_equal


@pytest.mark.parametrize("as_source", STATE_DICTS)
def test_another_policy_differs_in_what_is_other(as_source, engine, tmp_path):
    policy = dict(engine.policy)
    for name in (K_PROJ, NORM):
        policy[name] = policy[name].clone()
        policy[name].view(-1)[-1] += 1.0
    report = engine.verify(lambda: as_source(policy, tmp_path))
    assert report.differing == {K_PROJ: (0, 1), NORM: (0, 1)}


@pytest.mark.parametrize("name", [O_PROJ, UP_PROJ, NORM])
@pytest.mark.parametrize("part", ["weight", "scale"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_bit_that_flipped_on_one_rank_is_found_there(place, part, name, engine):
    (slot,) = (slot for slot in engine.cluster.shards[1].slots() if slot.name == name)
    held = slot.weight if part == "weight" or slot.scale is None else slot.scale
    row = held[place] if held.ndim > 1 else held
    row.view(torch.uint8)[place] ^= 1
    report = engine.verify(lambda: {"state_dict": engine.policy})
    assert report.differing == {name: (1,)}
    assert not report.is_equal
    engine.each("refit", lambda: {"state_dict": engine.policy})
    assert engine.verify(lambda: {"state_dict": engine.policy}).is_equal


def test_tensors_larger_than_a_bucket_are_compared_part_by_part():
    engine = Engine("here", "replicated")
    for target in engine.cluster.targets:
        target.close()
    found = engine.verify(lambda: {"state_dict": engine.policy})
    assert all(rank.extra_bytes < 3 << 20 for rank in found.ranks)


def test_a_policy_that_does_not_fit_is_refused_and_the_engine_goes_on(engine):
    missing = {name: tensor for name, tensor in engine.policy.items() if name != NORM}
    error = engine.verify(lambda: {"state_dict": missing})
    assert isinstance(error, InvalidSourceError)
    assert error.problems == (f"{NORM}: missing",)
    bad = {**engine.policy, NORM: torch.full_like(engine.policy[NORM], torch.nan)}
    error = engine.verify(lambda: {"state_dict": bad})
    assert isinstance(error, NonFiniteError)
    assert "nothing was written" in str(error).lower() or "untouched" in str(error).lower() or "serve" in str(error)


def test_a_one_shot_iterator_that_does_not_fit_leaves_the_engine_clean(engine):
    missing = {name: tensor for name, tensor in engine.policy.items() if name != NORM}
    error = engine.verify(lambda: {"state_dict": iter(missing.items())})
    assert isinstance(error, InvalidSourceError)
    assert not error.written
    assert engine.verify(lambda: {"state_dict": iter(engine.policy.items())}).is_equal


def test_an_engine_that_a_refit_left_dirty_is_not_said_to_serve_what_it_holds(engine):
    torn = engine.policy | {NORM: torch.full_like(engine.policy[NORM], float("nan"))}
    assert all(isinstance(error, NonFiniteError) for error in engine.each("refit", lambda: {"state_dict": torn}))
    found = engine.verify(lambda: {"state_dict": engine.policy | {NORM: engine.policy[NORM].clone()}})
    assert found.is_dirty and not found
    engine.each("refit", lambda: {"state_dict": engine.policy})
    assert engine.verify(lambda: {"state_dict": engine.policy})


def test_a_refit_after_it_writes_what_it_would_have_written(engine):
    engine.verify(lambda: {"state_dict": engine.policy})
    policy = engine.cluster.make_policy(2)
    assert not engine.verify(lambda: {"state_dict": policy}).is_equal
    engine.each("refit", lambda: {"state_dict": policy})
    engine.cluster.assert_holds(policy, version=2)


def test_a_broadcast_is_not_compared():
    remote = Remote(Cluster(), transport="collective")
    with pytest.raises(UnsupportedEngineError, match="leave out transport"):
        remote.refitter.verify({})


def test_weights_that_sleep_are_not_read(engine, monkeypatch):
    monkeypatch.setattr("fp8refit.ranks.target.are_mapped", lambda inventory: False)
    assert isinstance(engine.verify(lambda: as_mapping(engine.policy, None)), EngineAsleepError)
