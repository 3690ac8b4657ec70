"""What a repeated broadcast costs the trainer beside its bytes, counted as in `test_steady_state.py`."""

from collections import Counter

import pytest
import torch

import fp8refit.sender
from fp8refit.config import RefitConfig
from fp8refit.kernels import triton_table
from fp8refit.sender import Sender
from fp8refit.sources import as_source
from fp8refit.transport.collective import Transfer
from fp8refit.wire import choose_wire
from tests.fakes import FakeModel, make_policy, make_target
from tests.test_steady_state import ALLOCATIONS, Operations

CPU = torch.device("cpu")


class NoCommunicator:
    """See `fp8refit.transport.collective.Communicator`: remembers what it was given."""

    def __init__(self):
        self.sent = []

    def broadcast(self, buffer, *, timeout_s, sections):
        self.sent.append(buffer.numel())
        return Transfer(lambda: True)

    def wait(self, transfer, *, timeout_s):
        pass

    def agree(self, error, *, timeout_s):
        if error is not None:
            raise error


@pytest.fixture
def launches(monkeypatch):
    """The kinds of work that were launched."""
    recorded = []
    monkeypatch.setattr(triton_table, "_run", lambda launch, *_, **__: recorded.append(launch.kind.op))
    monkeypatch.setattr(fp8refit.sender, "compile_table", triton_table.TritonTable)
    return recorded


def steady_state(num_layers, launches):
    """Launches, operations and bytes of the third broadcast of tensors that a trainer wrote in place."""
    model, config = FakeModel(num_layers), RefitConfig()
    policy = make_policy(model, 1)
    source = as_source(policy)
    sender = Sender(choose_wire(source.scan()[0], [make_target(model).layout()], config), config, CPU)
    communicator = NoCommunicator()
    for _ in range(2):
        sender.send(source, communicator, "refit")
    launches.clear()
    communicator.sent.clear()
    with Operations() as operations:
        sender.send(as_source(policy), communicator, "refit")
    return list(launches), operations.counts, sum(communicator.sent)


def test_launches_are_as_many_for_any_number_of_tensors(launches):
    few, _, few_bytes = steady_state(1, launches)
    many, _, many_bytes = steady_state(12, launches)
    assert Counter(few) == Counter(many)
    assert many_bytes > 8 * few_bytes


def test_nothing_is_allocated_and_operations_do_not_grow(launches):
    _, few, _ = steady_state(1, launches)
    _, many, _ = steady_state(12, launches)
    assert {name for name in many if name.startswith(ALLOCATIONS)} == set()
    grown = {name for name in many if many[name] > few[name]}
    assert grown <= {"aten.detach.default"}
