"""The few calls of NCCL that a broadcast needs, through ctypes, on a communicator of its own.

Nothing here waits: a communicator is made and used without blocking, and its state is asked for. So every wait is the caller's,
to a deadline, and a communicator whose peer died is aborted by the caller. `torch.distributed` offers the same only with a
watchdog thread, which ends the process around it, or with environment variables that the engine's own groups would read too.
The library is the one that torch has loaded.
"""

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8refit.errors import TransportError

UNIQUE_ID_BYTES = 128
_ABORT_S = 0.2
"""How long the end of communicators is waited for, which comes only once their members on this host all abort theirs."""
_HIGH_PRIORITY = -1
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_UNDEFINED = -(1 << 31)
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21800
"""The layout of `_Config` is that of NCCL 2.18, whose padding later ones use; what it lacks they take as undefined."""


_SETTINGS = {"NCCL_CUMEM_ENABLE": "1", "NCCL_ALGO": "", "NCCL_PROTO": "", "NCCL_BUFFSIZE": ""}
"""By which variables ranks choose how they map each other's memory and in which steps they send, and what holds if unset."""


class _UniqueId(ctypes.Structure):
    """`ncclUniqueId`, which crosses calls by value."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """`ncclConfig_t`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
    )


_ARGUMENTS = {
    "ncclGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (
        *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config)),
    ),
    "ncclCommGetAsyncError": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)),
    "ncclCommAbort": (ctypes.c_void_p,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclBroadcast": (
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_void_p, ctypes.c_void_p),
    ),
}


@cache
def _library() -> Any:
    """NCCL, as torch has loaded it.

    Raises:
        TransportError: There is none.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise TransportError(f"NCCL cannot be loaded ({error}); install PyTorch with CUDA") from error
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = (ctypes.c_int,), ctypes.c_char_p
    return library


def terms() -> dict[str, str]:
    """What has to be the same for all ranks of a communicator: NCCL does not look, and hangs or fails without a reason.

    Raises:
        TransportError: There is no NCCL.
    """
    number = ctypes.c_int()
    _check("ncclGetVersion", _library().ncclGetVersion(ctypes.byref(number)))
    return {"NCCL": str(number.value)} | {name: os.environ.get(name, usual) for name, usual in _SETTINGS.items()}


def unique_id() -> bytes:
    """What the ranks of one communicator have in common.

    Raises:
        TransportError: NCCL cannot open a socket.
    """
    name = _UniqueId()
    _check("ncclGetUniqueId", _library().ncclGetUniqueId(ctypes.byref(name)))
    return bytes(name)


class NcclCommunicator:
    """One rank of a communicator. `is_settled` is asked until it is true, after making it and after every call.

    Args:
        name: What `unique_id` gave on one of the ranks.
        rank: Place among them.
        size: How many there are.
        device: The GPU of this rank, which no other rank may have.
        stream: What its calls run on, one after another. Communicators that share one can be used at the same time: two kernels
            that wait for others of their kind never hold the GPU against each other. If none is given, one of high priority:
            a pack or a fill that is queued keeps no bucket waiting. torch hands out the same few streams in turn, so that one
            of ordinary priority may be the engine's own, or that of a capture.

    Raises:
        TransportError: NCCL refuses.
    """

    def __init__(
        self, name: bytes, *, rank: int, size: int, device: torch.device, stream: torch.cuda.Stream | None = None
    ) -> None:
        self.device = device
        self._handle = ctypes.c_void_p()
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_CONFIG_MAGIC,
            version=_CONFIG_VERSION,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_UNDEFINED,
            net_name=None,
            split_share=_UNDEFINED,
            traffic_class=_UNDEFINED,
        )
        with torch.cuda.device(device):
            self.stream = stream if stream is not None else torch.cuda.Stream(device, _HIGH_PRIORITY)  # type: ignore[no-untyped-call]
            code = _library().ncclCommInitRankConfig(
                ctypes.byref(self._handle), size, _UniqueId.from_buffer_copy(name), rank, ctypes.byref(config)
            )
        _check("ncclCommInitRankConfig", code)

    def is_settled(self) -> bool:
        """Whether nothing that was asked for is still in progress on the host.

        Raises:
            TransportError: Something failed, here or at a peer.
        """
        if not self._handle:
            raise TransportError("the group was left")
        state = ctypes.c_int(_SUCCESS)
        _check("ncclCommGetAsyncError", _library().ncclCommGetAsyncError(self._handle, ctypes.byref(state)))
        _check("NCCL", state.value)
        return state.value != _IN_PROGRESS

    def broadcast(self, buffer: Tensor, *, root: int) -> None:
        """Send the bytes of `buffer` from `root`, or receive them, after everything asked for before. Returns at once.

        Args:
            buffer: uint8, contiguous, on this rank's GPU. What the current stream does with it until now comes first; it is
                not touched again before an event has come that `stream` recorded once this has settled.
            root: Rank that sends.
        """
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            address = buffer.data_ptr()
            stream = self.stream.cuda_stream
            code = _library().ncclBroadcast(address, address, buffer.numel(), _UINT8, root, self._handle, stream)
        _check("ncclBroadcast", code)

    def give_up(self) -> ctypes.c_void_p:
        """Be used no more, and give the handle to whoever aborts it; none if that was done."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        return handle


@contextmanager
def launched_together() -> Iterator[None]:
    """Calls on several communicators inside are launched in their order, by one thread of NCCL's and not by one for each.

    Raises:
        TransportError: NCCL refuses.
    """
    _check("ncclGroupStart", _library().ncclGroupStart())
    try:
        yield
    finally:
        code = _library().ncclGroupEnd()
    _check("ncclGroupEnd", code)


def abort_together(communicators: Sequence[NcclCommunicator]) -> None:
    """End whatever is under way on several communicators of one rank, and give everything back. May be repeated.

    As one group: what one gives back waits for the GPU, and so for a kernel of the next, which waits for a peer until that one
    is aborted too (NVIDIA/nccl#1013). In a thread of its own: kernels end at once, but memory is given back only when every
    member on this host has closed its connections (NVIDIA/nccl#863), and who goes first does not wait for who goes last.
    """
    handles = [each.give_up() for each in communicators]
    if not any(handles):
        return
    thread = threading.Thread(
        target=_abort, args=(handles, communicators[0].device), name="fp8refit-abort", daemon=True
    )
    thread.start()
    thread.join(_ABORT_S)


def _abort(handles: Sequence[ctypes.c_void_p], device: torch.device) -> None:
    library = _library()
    with torch.cuda.device(device):
        library.ncclGroupStart()
        for handle in handles:
            library.ncclCommAbort(handle)
        library.ncclGroupEnd()


def _check(call: str, code: int) -> None:
    if code in (_SUCCESS, _IN_PROGRESS):
        return
    text = _library().ncclGetErrorString(code)
    reason = text.decode() if text else str(code)
    raise TransportError(
        f"{call}: {reason}. Trainer and engine ranks need a GPU each (on the same GPU tensors go by CUDA IPC, "
        'transport="auto"), and a network between them; NCCL_DEBUG=WARN says more'
    )
