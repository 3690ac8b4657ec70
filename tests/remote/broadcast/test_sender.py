"""What a repeated broadcast costs the trainer beside its bytes, counted as in `test_steady_state.py`."""

import weakref
from collections import Counter

import pytest
import torch

import fp8refit.remote.broadcast.sender
from fp8refit.config import RefitConfig
from fp8refit.errors import NonFiniteError
from fp8refit.kernels import triton_table
from fp8refit.live.layout_guard import LayoutGuard
from fp8refit.live.slots import TensorMeta
from fp8refit.remote.broadcast.sections import find_sections
from fp8refit.remote.broadcast.sender import Sender
from fp8refit.remote.broadcast.source_reader import Reader
from fp8refit.remote.broadcast.wire_formats import choose_wire
from fp8refit.sources.row_runs import Piece
from fp8refit.sources.source import MappingSource, as_source
from fp8refit.transport.collective.links import Transfer
from tests.driver.test_steady_state import ALLOCATIONS, Operations
from tests.fake_ranks import Cluster, stack_experts
from tests.fakes import FakeModel, make_policy, make_target
from tests.kernels.tables import record_launches

CPU = torch.device("cpu")


class NoCommunicator:
    """See `fp8refit.transport.collective.communicator.Communicator`: remembers what it was given."""

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
    recorded = record_launches(monkeypatch)
    monkeypatch.setattr(fp8refit.remote.broadcast.sender, "compile_table", triton_table.TritonTable)
    return recorded


def steady_state(num_layers, launches):
    """Launches, operations and bytes of the third broadcast of tensors that a trainer wrote in place."""
    model, config = FakeModel(num_layers), RefitConfig()
    policy = make_policy(model, 1)
    source = as_source(policy)
    sender = Sender(choose_wire(source.scan()[0], [make_target(model).live.layout()], config), config, CPU)
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


def test_a_bucket_of_many_experts_is_packed_by_its_tensors_and_not_by_its_runs(monkeypatch):
    cluster = Cluster("experts in parts")
    policy, config = stack_experts(cluster.make_policy(1)), RefitConfig()
    layouts = [target.live.layout() for target in cluster.targets]
    wire = choose_wire(as_source(policy).scan()[0], layouts, config)
    sender = Sender(wire, config, CPU)
    sender.send(as_source(policy), NoCommunicator(), "refit")
    monkeypatch.setattr(Reader, "batches", None)
    sender.send(as_source(policy), NoCommunicator(), "refit")


def test_a_tensor_of_several_buckets_is_brought_to_the_device_once(monkeypatch):
    policy, config = {"w": torch.ones(3000, 1000)}, RefitConfig(bucket_bytes=1 << 20)
    sender = Sender(choose_wire(as_source(policy).scan()[0], [], config), config, CPU)
    assert len(sender.buckets) > 5
    brought, original = [], torch.Tensor.to

    def to(tensor, wanted):
        if wanted == CPU:
            brought.append(tuple(tensor.shape))
        return original(tensor, wanted)

    monkeypatch.setattr(torch.Tensor, "to", to)
    for count in (1, 2):
        sender.send(as_source(policy), NoCommunicator(), "refit")
        assert brought == [(3000, 1000)] * count


class Sent(NoCommunicator):
    """Keeps the bytes."""

    def broadcast(self, buffer, *, timeout_s, sections):
        self.sent += [bytes(buffer.numpy()), *(bytes(part.numpy()) for part in sections.values())]
        return Transfer(lambda: True)


def test_a_policy_that_is_laid_out_as_the_last_is_not_looked_at_tensor_by_tensor(monkeypatch):
    config, communicator = RefitConfig(bucket_bytes=1 << 20), Sent()
    policies = [{name: torch.randn(600, 1024) for name in ("v", "w")} for _ in range(3)]
    wire = choose_wire(as_source(policies[0]).scan()[0], [], config)

    guard = LayoutGuard(list(policies[0]), list(policies[0].values()))

    def sent_by(sender, policy):
        source, communicator.sent = as_source(policy), []
        layout = guard if guard.holds(source.sent_names, source.sent) else None
        sender.send(source, communicator, "refit", layout=layout)
        return communicator.sent

    expected = [sent_by(Sender(wire, config, CPU), policy) for policy in policies]
    assert expected[0] != expected[1]
    sender = Sender(wire, config, CPU)
    assert sent_by(sender, policies[0]) == expected[0]
    with monkeypatch.context() as patch:
        patch.setattr(MappingSource, "tensors", property(lambda source: pytest.fail("read one by one")))
        assert sent_by(sender, policies[1]) == expected[1]
    other = {name: values.t().contiguous().t() for name, values in policies[2].items()}
    assert sent_by(sender, other) == expected[2]
    policies[1]["v"][3, 5] = torch.nan
    with pytest.raises(NonFiniteError, match="v"):
        sent_by(sender, policies[1])
    assert sent_by(sender, policies[0]) == expected[0]


def test_tensors_that_are_there_and_streams_may_follow_each_other():
    """A table that was made for one piece of a bucket is not one for all of it."""
    cluster, config = Cluster("experts in parts"), RefitConfig()
    policies = [stack_experts(cluster.make_policy(seed)) for seed in (1, 2, 3, 4)]
    layouts = [target.live.layout() for target in cluster.targets]
    wire = choose_wire(as_source(policies[0]).scan()[0], layouts, config)

    def make():
        sender = Sender(wire, config, CPU)
        for buffer in sender._buffers:
            buffer.zero_()  # nobody writes what is between tensors
        return sender

    sender = make()
    for policy, is_stream in zip(policies, (True, False, True, False), strict=True):
        source = as_source(lambda policy=policy: iter(policy.items())) if is_stream else as_source(policy)
        sent, expected = Sent(), Sent()
        sender.send(source, sent, "refit")
        make().send(as_source(policy), expected, "refit")
        assert sent.sent == expected.sent


class Experts:
    """Stacks of two experts that come one by one; see `InPieces`. Counts those that are still held then."""

    is_repeatable = True

    def __init__(self, policy):
        self.policy, self.num_held = policy, []

    def scan(self):
        return {name: TensorMeta.of(tensor) for name, tensor in self.policy.items()}, ()

    def pieces(self, max_bytes):
        given = []
        for name, tensor in self.policy.items():
            for first in range(0, tensor.shape[0], 1 if tensor.ndim == 3 else tensor.shape[0]):
                rows = tensor[first : first + 1].clone() if tensor.ndim == 3 else tensor.clone()
                piece = Piece(name=name, first_row=first, tensor=rows, full_shape=tuple(tensor.shape))
                given.append(weakref.ref(rows))
                del rows
                yield piece
                del piece
                self.num_held.append(sum(ref() is not None for ref in given))


def test_a_stream_of_stacks_is_packed_piece_by_piece_and_nothing_of_it_is_held():
    cluster = Cluster("experts in parts")
    source, config = Experts(stack_experts(cluster.make_policy(1))), RefitConfig()
    layouts = [target.live.layout() for target in cluster.targets]
    sections = find_sections(layouts)
    wire = choose_wire(source.scan()[0], layouts, config, sections)
    sender = Sender(wire, config, CPU, num_sections=sections.num_sections)
    for _ in range(2):
        sender.send(source, NoCommunicator(), "refit")
    assert len(wire.tensors) == 1 + 2 * 3
    assert len(sender._tables) == 1 + 2 * 2, "one for each piece"
    assert source.num_held == [0] * 2 * 5
