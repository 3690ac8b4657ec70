"""The few NCCL calls that a broadcast needs, through ctypes, on a communicator of its own.

Nothing here waits. Communicators are non-blocking, and the caller polls their state with its own deadline and aborts a
communicator whose peer died. `torch.distributed` offers this only with a watchdog thread that ends the process, or
through environment variables that the engine's own groups would read too. Uses the NCCL library that torch has loaded.
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
"""How long to wait for communicators to end, which happens only once all members on this host abort theirs."""
_HIGH_PRIORITY = -1
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_UNDEFINED = -(1 << 31)
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21800
"""`_Config` has the layout of NCCL 2.18. Later versions use its padding and treat missing fields as undefined."""


_SETTINGS = {"NCCL_CUMEM_ENABLE": "1", "NCCL_ALGO": "", "NCCL_PROTO": "", "NCCL_BUFFSIZE": ""}
"""Variables that decide how ranks map each other's memory and send data, with their defaults."""


class _UniqueId(ctypes.Structure):
    """`ncclUniqueId`, passed by value."""

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
    """Return the NCCL library that torch has loaded.

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
    """Return what must be equal on all ranks of a communicator. NCCL does not check; it hangs or fails without a reason.

    Raises:
        TransportError: NCCL is not available.
    """
    number = ctypes.c_int()
    _check("ncclGetVersion", _library().ncclGetVersion(ctypes.byref(number)))
    return {"NCCL": str(number.value)} | {name: os.environ.get(name, usual) for name, usual in _SETTINGS.items()}


def unique_id() -> bytes:
    """Create the id that the ranks of one communicator share.

    Raises:
        TransportError: NCCL cannot open a socket.
    """
    name = _UniqueId()
    _check("ncclGetUniqueId", _library().ncclGetUniqueId(ctypes.byref(name)))
    return bytes(name)


class NcclCommunicator:
    """One rank of a communicator. Poll `is_settled` until it is true, after creating it and after every call.

    Args:
        name: Result of `unique_id` on one of the ranks.
        rank: This rank.
        size: Number of ranks.
        device: This rank's GPU. No other rank may use it.
        stream: Stream of its calls. Communicators on one stream can be used at the same time, because their kernels,
            which wait for peers, cannot block each other on the GPU. By default a new high-priority stream, so that
            queued packs and fills do not delay buckets. torch hands out few streams in turn, so one of normal priority
            could be the engine's, or one under graph capture.

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
        """Whether the host has finished every request.

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
        """Send the bytes of `buffer` from `root`, or receive them, after all earlier calls. Returns at once.

        Args:
            buffer: uint8, contiguous, on this rank's GPU. Earlier work on the current stream comes first. Do not touch it
                before an event on `stream`, recorded once this has settled, has passed.
            root: The sending rank.
        """
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            address = buffer.data_ptr()
            stream = self.stream.cuda_stream
            code = _library().ncclBroadcast(address, address, buffer.numel(), _UINT8, root, self._handle, stream)
        _check("ncclBroadcast", code)

    def give_up(self) -> ctypes.c_void_p:
        """Stop using the communicator, and return its handle for aborting; null if it was returned before."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        return handle


@contextmanager
def launched_together() -> Iterator[None]:
    """Launch the calls on several communicators inside the block in order, from one NCCL thread instead of one for each.

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
    """End whatever is pending on several communicators of one rank, and free them. May be called repeatedly.

    They end as one group: freeing one waits for the GPU, and so for the next one's kernel, which waits for a peer until
    that communicator is aborted too (NVIDIA/nccl#1013). It runs in a thread: kernels end at once, but memory is freed
    only when every member on this host has closed its connections (NVIDIA/nccl#863), and the first to leave should not
    wait for the last.
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
        f"{call}: {reason}. Trainer and engine ranks each need a GPU of their own (on the same GPU, use CUDA IPC: "
        'transport="auto"), and a network between them; set NCCL_DEBUG=WARN for details'
    )
