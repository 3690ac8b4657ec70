"""Streams that change under a reader: a GPU's are stood in for by ones that keep what is queued, in order."""

from contextlib import contextmanager

import pytest
import torch

from fp8refit.config import RefitConfig
from fp8refit.fill.direct import DirectFill
from fp8refit.kernels.reference_table import ReferenceTable
from fp8refit.remote.host.packing import Packer
from fp8refit.sources.row_runs import Piece
from fp8refit.sources.source import PushedSource
from fp8refit.sources.work_stream import WorkStream
from tests.fakes import FakeModel, assert_holds, make_policy, make_target

GPU = torch.device("cuda", 0)


class FakeStream:
    def __init__(self):
        self.done = []
        """What has come before whatever is queued next."""

    def wait_stream(self, other):
        self.done += [work for work in other.done if work not in self.done]

    def synchronize(self):
        pass


class FakeEvent:
    def record(self, stream):
        self.after = list(stream.done)


@pytest.fixture
def streams(monkeypatch):
    """The streams that were made current, the last one first."""
    current = [FakeStream()]

    @contextmanager
    def on(stream):
        current.insert(0, stream)
        yield
        current.pop(0)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return current


def test_work_follows_what_the_current_stream_has_queued_and_comes_before_what_it_queues_next(streams):
    work, home = WorkStream(GPU), streams[0]
    others = [FakeStream(), FakeStream()]
    for index in range(4):
        with torch.cuda.stream(others[index % 2]):
            streams[0].done.append(f"made {index}")
            with work.joined():
                assert streams[0] is home and f"made {index}" in home.done
                home.done.append(f"read {index}")
            assert streams[0] is others[index % 2] and f"read {index}" in streams[0].done
    assert [each for each in home.done if each.startswith("read")] == [f"read {index}" for index in range(4)]


def test_on_the_stream_itself_nothing_waits(streams):
    work, home = WorkStream(GPU), streams[0]
    home.wait_stream = None
    with work.joined():
        assert streams == [home]


class FakeTensor:
    """All that a packer asks of one."""

    dtype, device, nbytes, shape = torch.bfloat16, GPU, 4, (2,)

    def detach(self):
        return self


class FakeBucket:
    def __init__(self, streams):
        self._streams, self.segment, self.is_closed = streams, None, False

    def has_room(self, tensor):
        return True

    def put(self, name, tensor):
        self._streams[0].done.append(name)

    def clear(self):
        pass

    def close(self):
        self.is_closed = True


def test_ranks_are_told_of_a_set_when_the_copies_of_all_streams_are_done(streams, monkeypatch):
    """As of a generator that yields inside `with torch.cuda.stream(...)`, and ends outside."""
    monkeypatch.setattr("fp8refit.remote.protocol.messages.Packed.encode", lambda packed: "told")
    monkeypatch.setattr("fp8refit.remote.protocol.messages.Packed.__init__", lambda packed, **_: None)
    packer = Packer(lambda device, num_bytes: FakeBucket(streams))

    def tensors():
        for name in ("a", "b", "c"):
            with torch.cuda.stream(FakeStream()):
                yield name

    for _ in range(2):
        packer.begin(1 << 10)
        for name in tensors():
            packer.put(Piece(name=name, first_row=0, tensor=FakeTensor(), full_shape=(2,)))
        packed = packer.seal()
        assert [event.after[-3:] for event in packed.events] == [["a", "b", "c"]]


def test_a_set_holds_no_name_twice_and_no_more_than_are_told_at_once(streams, monkeypatch):
    monkeypatch.setattr("fp8refit.remote.host.packing._MOST_REFS", 2)
    packer = Packer(lambda device, num_bytes: FakeBucket(streams))
    packer.begin(1 << 10)
    a, b, c = (Piece(name=name, first_row=0, tensor=FakeTensor(), full_shape=(2,)) for name in "abc")
    packer.put(a)
    assert packer.has_room(b) and not packer.has_room(a)
    packer.put(b)
    assert not packer.has_room(c)


@pytest.mark.parametrize("how", ["freed", "begun anew", "closed"])
def test_a_bucket_that_was_too_small_is_given_back_however_its_stream_ends(how, streams):
    packer, made = Packer(lambda device, num_bytes: made.append(FakeBucket(streams)) or made[-1]), []
    packer.begin(1)
    packer.put(Piece(name="a", first_row=0, tensor=FakeTensor(), full_shape=(2,)))
    packer.drop_bucket(GPU)
    assert not made[0].is_closed
    {"freed": packer.free_dropped, "begun anew": lambda: packer.begin(1), "closed": packer.close}[how]()
    assert made[0].is_closed


class ElsewhereFill(DirectFill):
    """Has nothing come to the engine's device, so that all is staged."""

    def __init__(self, *args):
        super().__init__(*args)
        self.device = torch.device("meta")


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 1 << 30], ids=["flushed meanwhile", "flushed at the end"])
@pytest.mark.parametrize("is_direct", [True, False], ids=["where they lie", "staged"])
@pytest.mark.parametrize("is_list", [True, False], ids=["list", "iterator"])
def test_a_stream_is_written_on_one_stream_and_read_on_whatever_stream_it_likes(
    is_list, is_direct, bucket_bytes, monkeypatch
):
    joined, is_joined, launched = WorkStream.joined, [], []

    @contextmanager
    def noted(work):
        is_joined.append(True)
        with joined(work):
            yield
        is_joined.pop()

    def launch(table, **options):
        launched.append(bool(is_joined))
        return launch_all(table, **options)

    launch_all = ReferenceTable.launch
    monkeypatch.setattr(WorkStream, "joined", noted)
    monkeypatch.setattr(ReferenceTable, "launch", launch)
    if not is_direct:
        monkeypatch.setattr("fp8refit.fill.fills.DirectFill", ElsewhereFill)
    model = FakeModel(num_layers=3)
    policy = make_policy(model, seed=1)

    def tensors():
        for name, tensor in policy.items():
            assert not is_joined
            yield name, tensor

    target = make_target(model)
    target.begin(target.prepare(PushedSource(None), RefitConfig(bucket_bytes=bucket_bytes)))
    target.push(list(tensors()) if is_list else tensors())
    target.finish()
    target.commit()
    assert_holds(model, policy)
    assert launched and all(launched)
