"""Drivers of one rank each, of which one fails before all agreed to write. No engine; what ranks do alone: `test_rank.py`."""

import pytest

from fp8refit import RankFailedError, Refitter
from tests.fake_ranks import ClientEntryPoint, Cluster, Drivers


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("of the engine's own")])
def test_one_driver_interrupted_before_the_write_is_the_others_failure(error):
    cluster = Cluster()
    drivers = Drivers(cluster, timeout_s=2)
    drivers.refit({"state_dict": cluster.make_policy(0)})
    before = cluster.live_bytes()
    engine = drivers.refitters[0]._engine

    async def flush_caches():
        del engine.flush_caches
        raise error

    engine.flush_caches = flush_caches
    interrupted, other = drivers.refit({"state_dict": cluster.make_policy(1)})
    assert interrupted is error
    assert type(other) is RankFailedError
    assert (cluster.live_bytes(), cluster.states) == (before, [(False, 1)] * 2)
    assert [client.blocked for client in drivers.clients] == [None, None]
    drivers.refit({"state_dict": cluster.make_policy(1)})
    cluster.assert_holds(cluster.make_policy(1), version=2)


def test_drivers_that_want_to_refit_in_different_ways_are_told_and_nothing_is_written():
    cluster = Cluster()
    drivers = Drivers(cluster, timeout_s=5)
    drivers.refit({"state_dict": cluster.make_policy(0)})
    before = cluster.live_bytes()
    drivers.refitters[1] = Refitter(drivers.clients[1], timeout_s=50)
    errors = drivers.refit({"state_dict": cluster.make_policy(1)})
    assert [type(error) for error in errors] == [RankFailedError] * 2
    assert "give all the same RefitConfig" in str(errors[0])
    assert (cluster.live_bytes(), cluster.states) == (before, [(False, 1)] * 2)
