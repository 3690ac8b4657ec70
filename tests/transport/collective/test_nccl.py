"""What is asked of NCCL, which needs GPUs: tests/gpu/test_broadcast.py has it for real."""

import ctypes
import threading
import time
from contextlib import nullcontext

import pytest
import torch

from fp8refit.errors import TransportError
from fp8refit.transport.collective import nccl
from fp8refit.transport.collective.links import NcclLink, broadcast_all
from fp8refit.transport.collective.nccl import NcclCommunicator, abort_together

DEVICE = torch.device("cpu")
HANDLES = (0x10, 0x20)


class Library:
    """Makes communicators of `HANDLES`, and remembers what it was asked for."""

    def __init__(self):
        self.calls, self.configs, self.handles = [], [], iter(HANDLES)
        self.others_left = threading.Event()
        self.others_left.set()
        self.state = 0

    def ncclCommInitRankConfig(self, handle, size, name, rank, config):
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = next(self.handles)
        self.configs.append(nccl._Config.from_buffer_copy(ctypes.cast(config, ctypes.POINTER(nccl._Config)).contents))
        self.calls.append(f"init {rank} of {size} as {bytes(name)[:3].decode()}")
        return 7

    def ncclCommGetAsyncError(self, handle, state):
        ctypes.cast(state, ctypes.POINTER(ctypes.c_int))[0] = self.state
        return 0

    def ncclGetErrorString(self, code):
        return f"error {code}".encode()

    def ncclBroadcast(self, source, target, num_bytes, kind, root, handle, stream):
        self.calls.append(f"broadcast {num_bytes} from {root} on {handle.value:#x}")
        return self.state

    def ncclGroupStart(self):
        self.calls.append("start")
        return 0

    def ncclCommAbort(self, handle):
        self.calls.append(f"abort {handle.value:#x}")

    def ncclGroupEnd(self):
        self.calls.append("end")
        self.others_left.wait(5)
        return 7


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setattr(nccl, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "what packs")
    return library


def make(rank=1):
    return NcclCommunicator(b"abc".ljust(128, b"\0"), rank=rank, size=2, device=DEVICE, stream=Stream())


class Stream:
    """Remembers what it waits for."""

    cuda_stream = 0x5

    def __init__(self):
        self.waited_for = []

    def wait_stream(self, stream):
        self.waited_for.append(stream)


def link():
    """A link that is connected."""
    link = NcclLink.__new__(NcclLink)
    link.communicator = make()
    return link


def test_a_communicator_is_made_without_blocking(library):
    communicator = make()
    assert library.calls == ["init 1 of 2 as abc"]
    (config,) = library.configs
    assert (config.size, config.magic, config.blocking) == (48, 0xCAFEBEEF, 0)
    assert {config.min_ctas, config.max_ctas, config.cga_cluster_size, config.traffic_class} == {-(1 << 31)}
    library.state = 7
    assert not communicator.is_settled()
    library.state = 0
    assert communicator.is_settled()
    library.state = 6
    with pytest.raises(TransportError, match="error 6"):
        communicator.is_settled()


def test_broadcasts_to_all_and_to_a_section_are_one_launch_in_their_order(library):
    links = [link(), link()]
    library.calls.clear()
    broadcast_all([(links[0], torch.empty(7, dtype=torch.uint8))], 5.0)
    assert library.calls == ["broadcast 7 from 0 on 0x10"]
    assert links[0].stream.waited_for == ["what packs"]
    library.calls.clear()
    parts = [(each, torch.empty(size, dtype=torch.uint8)) for each, size in zip(links, (3, 4), strict=True)]
    broadcast_all(parts, 5.0)
    assert library.calls == ["start", "broadcast 3 from 0 on 0x10", "broadcast 4 from 0 on 0x20", "end"]
    library.calls.clear()
    library.state = 5
    with pytest.raises(TransportError, match="error 5"):
        broadcast_all(parts, 5.0)
    assert library.calls == ["start", "broadcast 3 from 0 on 0x10", "end"], "or nothing would be launched any more"


def test_all_communicators_of_a_rank_are_aborted_as_one_group(library):
    """What one gives back waits for kernels of the others."""
    communicators = [make(), make()]
    library.calls.clear()
    for _ in range(2):
        abort_together(communicators)
    assert library.calls == ["start", "abort 0x10", "abort 0x20", "end"]
    with pytest.raises(TransportError, match="was left"):
        communicators[0].is_settled()


def test_who_leaves_first_does_not_wait_for_the_others(library):
    """NCCL gives memory back once all members on a host have left."""
    library.others_left.clear()
    start_s = time.monotonic()
    abort_together([make()])
    assert time.monotonic() - start_s < 2
    assert library.calls[-1] == "end"
    library.others_left.set()
