"""What a repeated refit costs beside its bytes, counted, not timed: launches, tensor operations and allocations.

The work table is that of a GPU; its launches are recorded, not run. A change that makes a refit cost more with every tensor
fails here, on any machine.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fp8refit.fill.program
from fp8refit.kernels import triton_table
from fp8refit.live.slots import Op
from fp8refit.sources.source import as_source
from tests.fakes import FakeModel, make_policy, make_target, refit_target
from tests.kernels.tables import record_launches

ALLOCATIONS = (
    "aten.empty",
    "aten.zeros",
    "aten.ones",
    "aten.full",
    "aten.clone",
    "aten._to_copy",
    "aten.arange",
    "aten.cat",
)


class Operations(TorchDispatchMode):
    """Counts every tensor operation while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    """The kinds of work that were launched."""
    recorded = record_launches(monkeypatch)
    monkeypatch.setattr(fp8refit.fill.program, "compile_table", triton_table.TritonTable)
    return recorded


def steady_state(num_layers, launches, *, moves=False):
    """Launches, operations and report of the third refit from tensors that a trainer wrote in place, or that it moved."""
    model = FakeModel(num_layers)
    model.__dict__["_refresh"] = lambda: None  # what is derived from weights costs what it costs
    target, policy = make_target(model), make_policy(model, 1)
    for _ in range(2):
        refit_target(target, as_source(policy))
    if moves:
        policy = {name: tensor.clone() for name, tensor in policy.items()}
    launches.clear()
    with Operations() as operations:
        report = refit_target(target, as_source(policy))
    assert not report.is_first
    return list(launches), operations.counts, report


def test_launches_are_as_many_as_kinds_of_work(launches):
    few, _, _ = steady_state(1, launches)
    many, _, _ = steady_state(12, launches)
    assert few == many
    assert Counter(few)[Op.QUANTIZE] <= 2  # aligned sources, and others
    assert len(few) <= 4


def test_kernels_are_compiled_once_and_before_the_first_is_launched(monkeypatch):
    launched_before: list[int] = []
    launches = record_launches(monkeypatch, lambda: launched_before.append(len(launches)))
    monkeypatch.setattr(fp8refit.fill.program, "compile_table", triton_table.TritonTable)
    steady_state(4, launches)
    assert launched_before == [0] * len(launches) != []


@pytest.mark.parametrize("moves", [False, True])
def test_operations_are_as_many_for_any_number_of_tensors(launches, moves):
    _, few, _ = steady_state(1, launches, moves=moves)
    _, many, _ = steady_state(12, launches, moves=moves)
    assert few == many
    assert few["aten.copy_.default"] == 1 + moves  # the status back; the table to the device, if anything moved
    assert sum(few.values()) <= 12


def test_nothing_is_allocated(launches):
    _, counts, report = steady_state(4, launches)
    assert {name for name in counts if name.startswith(ALLOCATIONS)} == set()
    assert report.extra_bytes < 1 << 20


def test_bytes_are_those_of_the_slots(launches):
    _, _, report = steady_state(3, launches)
    slots = FakeModel(3).slots()
    assert report.bytes_read == sum(2 * slot.weight.numel() for slot in slots)
    assert report.bytes_written == sum(
        slot.weight.nbytes + (slot.scale.nbytes if slot.scale is not None else 0) for slot in slots
    )


def test_a_source_of_another_kind_would_be_seen(launches):
    """The counters count: with float32 for one tensor there is one more kind of work."""
    model = FakeModel(2)
    target, policy = make_target(model), make_policy(model, 1)
    refit_target(target, as_source(policy))
    before = len(launches)
    name = next(slot.name for slot in model.slots() if slot.is_quantized)
    refit_target(target, as_source({**policy, name: policy[name].float()}))
    assert len(launches) - before == before + 1
    with Operations() as operations:
        torch.ones(3).clone()
    assert {"aten.ones.default", "aten.clone.default"} <= set(operations.counts)
