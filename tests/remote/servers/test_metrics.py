"""What a server counts of its refits. That Prometheus' own client shows it: `tests/vllm/test_server.py`."""

import sys
from types import SimpleNamespace

import pytest
import torch

from fp8refit import Refitter
from fp8refit.errors import InvalidSourceError, NonFiniteError, TensorsForgottenError
from fp8refit.remote.servers.metrics import exported
from fp8refit.remote.servers.order_handler import OrderHandler
from fp8refit.remote.servers.orders import Resume
from tests.fake_ranks import Q_PROJ, arm
from tests.fake_server import URL, Running, entry_point_of
from tests.remote.servers.test_server_driver import dying_driver, give, pause, wait_until


class Values(dict):
    """The metrics by name, as `prometheus_client` would hold them."""

    def metric(self, name, documentation, labels=(), **options):
        if not labels:
            self[name] = 0

        def child(**kinds):
            key = (name, *kinds.values()) if kinds else name
            return SimpleNamespace(
                inc=lambda amount=1: self.update({key: self.get(key, 0) + amount}),
                set=lambda value: self.update({key: value}),
            )

        return SimpleNamespace(labels=child, **vars(child()))


@pytest.fixture
def values(monkeypatch):
    values = Values()
    client = SimpleNamespace(Counter=values.metric, Gauge=values.metric)
    monkeypatch.setitem(sys.modules, "prometheus_client", client)
    exported.cache_clear()
    yield values
    exported.cache_clear()


@pytest.fixture
def running(values, monkeypatch):
    running = Running()
    running.handler = OrderHandler(running.controls, exported())
    entry_point = entry_point_of(running)
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [entry_point])
    yield running
    running.close()


def test_refits_are_counted_and_failures_by_kind(running, values):
    assert values == {
        "fp8refit_refits": 0,
        "fp8refit_version": 0,
        "fp8refit_is_dirty": 0,
        "fp8refit_last_refit_seconds": 0,
    }
    policy = running.cluster.make_policy(1)
    refitter = Refitter(URL)
    refitter.refit(policy)
    assert (values["fp8refit_refits"], values["fp8refit_version"], values["fp8refit_is_dirty"]) == (1, 1, 0)
    assert 0 < values["fp8refit_last_refit_seconds"] < 60
    with pytest.raises(InvalidSourceError):
        refitter.refit({})
    assert (values["fp8refit_failures", "InvalidSourceError"], values["fp8refit_is_dirty"]) == (1, 0)
    with pytest.raises(NonFiniteError):
        refitter.refit(policy | {Q_PROJ: torch.full_like(policy[Q_PROJ], torch.nan)})
    assert (values["fp8refit_failures", "NonFiniteError"], values["fp8refit_is_dirty"]) == (1, 1)
    refitter.refit(policy)
    assert (values["fp8refit_refits"], values["fp8refit_version"], values["fp8refit_is_dirty"]) == (2, 2, 0)


def test_what_the_driver_mends_in_the_same_refit_is_no_failure(running, values):
    arm(running.cluster.targets[0], "judged", TensorsForgottenError("gone"))
    Refitter(URL).refit(running.cluster.make_policy(1))
    assert values["fp8refit_refits"] == 1
    assert [name for name in values if name[0] == "fp8refit_failures"] == []


def test_a_driver_that_dies_is_counted(running, values):
    driver, process = dying_driver()
    give(running, pause(), driver)
    process.kill()
    process.wait()
    wait_until(lambda: "resume" in running.events)
    wait_until(lambda: values["fp8refit_is_dirty"] == 0)
    assert (values["fp8refit_failures", "driver"], values["fp8refit_refits"]) == (1, 0)


def test_what_resumes_without_a_refit_is_none(running, values):
    driver, process = dying_driver()
    give(running, Resume(), driver)
    process.kill()
    process.wait()
    assert values["fp8refit_refits"] == values["fp8refit_last_refit_seconds"] == 0


def test_without_prometheus_client_nothing_is_exported(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    exported.cache_clear()
    exported()(failure="NonFiniteError", version=1, is_dirty=0, seconds=0.1)
    exported.cache_clear()
