"""Names that a trainer sends too much."""

import pytest
import torch

from fp8refit import InvalidSourceError, RefitConfig
from fp8refit.driver.completeness import Kind, Stream, claims_of_all
from fp8refit.live.layout import EngineLayout
from fp8refit.live.slots import TensorMeta
from fp8refit.ranks.rank import Rank
from fp8refit.remote.broadcast.wire_formats import choose_wire
from fp8refit.sources.source import as_source
from tests.fakes import FakeModel, assert_holds, make_policy, make_target, refit_target

EXTRA = {"critic.0.weight": torch.ones(3, 3), "critic.1.weight": torch.ones(2, dtype=torch.int64)}


@pytest.mark.parametrize("patterns", ["critic.*", ("critic.0.weight", "critic.?.weight"), ("critic.0.weight", "*.1.*")])
@pytest.mark.parametrize("make", [as_source, lambda policy: as_source(iter(policy.items()))], ids=["mapping", "stream"])
def test_what_patterns_name_may_come_and_is_reported(make, patterns):
    model = FakeModel()
    policy = make_policy(model, seed=1)
    report = refit_target(make_target(model), make(policy | EXTRA), ignore=patterns)
    assert set(EXTRA) <= set(report.ignored)
    assert_holds(model, policy)


def test_other_names_are_still_unexpected_and_the_error_names_the_option():
    model = FakeModel()
    with pytest.raises(InvalidSourceError) as raised:
        refit_target(make_target(model), as_source(make_policy(model, seed=1) | EXTRA), ignore="critic.0.*")
    assert [problem.partition(":")[0] for problem in raised.value.problems] == ["critic.1.weight"]
    assert str(raised.value).endswith("what is sent too much may come if ignore= names it")


def test_what_the_engine_needs_is_taken_although_a_pattern_names_it():
    model = FakeModel()
    policy = make_policy(model, seed=1)
    refit_target(make_target(model), as_source(policy), ignore="*")
    assert_holds(model, policy)


def test_the_drop_in_and_broadcasts_skip_it():
    model = FakeModel()
    target, config = make_target(model), RefitConfig(ignore="critic.*")
    stream = Stream(claims_of_all(Rank(target), config))
    assert [stream.kind_of(name) for name in ("critic.0.weight", "actor.0.weight")] == [Kind.SKIPPED, Kind.UNKNOWN]
    layout = target.layout()
    assert isinstance(layout, EngineLayout)
    metas = {name: TensorMeta.of(tensor) for name, tensor in (make_policy(model, seed=1) | EXTRA).items()}
    travels = {tensor.name: tensor.travels for tensor in choose_wire(metas, [layout], config).tensors}
    assert not any(travels[name] for name in EXTRA) and all(travels[name] for name in travels.keys() - EXTRA.keys())
