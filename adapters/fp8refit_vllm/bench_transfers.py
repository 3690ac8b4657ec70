"""Policies that come to vLLM as trainers send them, in the refit benchmark: with the drop-in, and without.

One tensor a call, from the process of the worker (as TRL does, colocated); or in buckets through one CUDA IPC handle, each
acknowledged before the next, and a larger tensor by a handle of its own (verl's protocol). And what a broadcast takes at least:
NCCL's own, of as many bytes.
"""

import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from fp8refit.bench.engine import Loads, Strategy
from fp8refit.driver.drop_in import DropInOptions
from fp8refit.driver.refitter import Refitter
from fp8refit.live.layout import EngineLayout
from fp8refit.transport.collective.communicator import Backend, Communicator, Meeting
from fp8refit_vllm import drop_in
from fp8refit_vllm.worker import Extension, rank_of

_ALIGNMENT_BYTES = 16
_BUCKETS = {"512mib": 512 << 20, "2gib": 2 << 30}
_WAIT_MS = 60_000
"""For the other end of a transfer, which may have failed."""
_DROP_IN_UNTIMED = 3
"""Until it knows in which order a policy comes."""
_WIRE_S = 60.0
_WIRE_BUFFER_BYTES = 1 << 30
_CUDA_INDEX = 6
"""Where the device is among what `torch.multiprocessing` says of a tensor."""

Update = Callable[[Mapping[str, Tensor]], object]


class How(StrEnum):
    """What becomes of the tensors that arrive."""

    DROP_IN = "drop-in"
    """A refit."""
    OWN = "load_weights"
    """vLLM's layerwise reload around the same calls."""
    NONE = "transfer"
    """Nothing: what the transfer takes by itself."""


_SAID = {
    How.DROP_IN: "the drop-in's refit of",
    How.OWN: "vLLM's layerwise reload of",
    How.NONE: "nothing but the transfer of",
}


def load(worker: Any, how: How, buckets: Iterable[list[tuple[str, Tensor]]]) -> None:
    """Do in a worker what a trainer does."""
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    network, config = worker.model_runner.get_model(), worker.vllm_config.model_config
    if how is How.OWN:
        reload.initialize_layerwise_reload(network)
    with torch.no_grad():
        for bucket in buckets:
            if how is not How.NONE:
                network.load_weights(bucket)
    if how is How.OWN:
        reload.finalize_layerwise_reload(network, config)
    elif how is How.DROP_IN:
        process_weights_after_loading(network, config, worker.device)


def switch(worker: Any, how: How) -> None:
    """Put the drop-in in, or take it out."""
    if how is How.DROP_IN:
        drop_in.install(worker, lambda: rank_of(worker), DropInOptions(drop_in=True))
    else:
        drop_in.remove(worker)


class Receiver(Extension):
    """For `worker_extension_cls`: the other end of `_Sender`, and of `Wire`."""

    _member: Communicator

    def join_trainer(self, meeting: str) -> None:
        """Join a group whose rank 0 is a trainer.

        Args:
            meeting: Where, as JSON.
        """
        self._member = Communicator.find(Meeting.model_validate_json(meeting), 1, timeout_s=_WIRE_S)
        self._member.join(self.device, timeout_s=_WIRE_S)  # type: ignore[attr-defined]

    def receive_bytes(self, num_bytes: int) -> None:
        """Receive what a trainer broadcasts, and do nothing with it."""
        broadcast_bytes(self._member, self.device, num_bytes)  # type: ignore[attr-defined]

    def leave_trainer(self) -> None:
        """Leave the group."""
        self._member.abort()

    def switch_transfer(self, how: str) -> None:
        """Put the drop-in in, or take it out."""
        switch(self, How(how))

    def receive_policy(self, how: str, address: str) -> None:
        """Receive a whole policy and load it.

        Args:
            how: A `How`.
            address: ZeroMQ's, of the sender.
        """
        import zmq

        device: torch.device = self.device  # type: ignore[attr-defined]
        with zmq.Context.instance().socket(zmq.REP) as socket:
            _limit(socket)
            socket.connect(address)
            buffer = _opened(pickle.loads(socket.recv()), device)
            socket.send(b"")

            def buckets() -> Iterator[list[tuple[str, Tensor]]]:
                while (message := socket.recv()) != b"":
                    parts, handle = pickle.loads(message)
                    memory = buffer if handle is None else _opened(handle, device).view(-1).view(torch.uint8)
                    yield [
                        (name, memory[start : start + size].view(dtype).view(shape))
                        for name, dtype, shape, start, size in parts
                    ]
                    torch.cuda.synchronize()  # as verl's receiver does before it lets the buffer be overwritten
                    socket.send(b"")
                socket.send(b"")

            load(self, How(how), buckets())


def _opened(handle: tuple[Any, tuple[Any, ...]], device: torch.device) -> Tensor:
    rebuild, said = handle
    tensor: Tensor = rebuild(*said[:_CUDA_INDEX], device.index, *said[_CUDA_INDEX + 1 :])
    return tensor


def _limit(socket: Any) -> None:
    """Let no call wait for ever, nor the end of the process."""
    import zmq

    for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        socket.setsockopt(option, _WAIT_MS)
    socket.setsockopt(zmq.LINGER, 0)


class _Sender:
    """Sends policies through one buffer."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def send(self, address: str, policy: Mapping[str, Tensor]) -> None:
        import zmq
        from torch.multiprocessing.reductions import reduce_tensor

        with zmq.Context.instance().socket(zmq.REQ) as socket:
            _limit(socket)

            def ask(said: Any) -> None:
                socket.send(said if said == b"" else pickle.dumps(said))
                socket.recv()

            socket.bind(address)
            ask(reduce_tensor(self._buffer))
            parts: list[tuple[Any, ...]] = []
            start = 0
            for name, tensor in policy.items():
                described = (name, tensor.dtype, tuple(tensor.shape))
                if tensor.nbytes > self._buffer.nbytes:
                    ask(([(*described, 0, tensor.nbytes)], reduce_tensor(tensor)))
                    continue
                if start + tensor.nbytes > self._buffer.nbytes:
                    torch.cuda.synchronize()
                    ask((parts, None))
                    parts, start = [], 0
                into = self._buffer[start : start + tensor.nbytes]
                into.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
                parts.append((*described, start, tensor.nbytes))
                start += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            torch.cuda.synchronize()
            ask((parts, None))
            ask(b"")


def broadcast_bytes(member: Communicator, device: torch.device, num_bytes: int) -> None:
    """Broadcast some bytes back to back. Every member of the group calls this."""
    size = min(_WIRE_BUFFER_BYTES, num_bytes)
    buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    sizes = [min(_WIRE_BUFFER_BYTES, num_bytes - start) for start in range(0, num_bytes, _WIRE_BUFFER_BYTES)]
    transfers = [member.broadcast(buffers[place % 2][:size], timeout_s=_WIRE_S) for place, size in enumerate(sizes)]
    for transfer in transfers:
        member.wait(transfer, timeout_s=_WIRE_S)


class Wire:
    """A group of a trainer and an engine of one rank, on different GPUs, in which bytes are broadcast and nothing else."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._member: Communicator | None = None
        self._num_bytes = 0

    @property
    def strategy(self) -> Strategy:
        """What the wire takes by itself."""
        return Strategy(
            name="nccl",
            summary="NCCL's broadcast of as many bytes as the engine holds, and nothing else",
            update=self._send,
            prepare=self._join,
            undo=self._leave,
            loads=Loads.NOTHING,
            is_on_request=True,
        )

    def _join(self, policy: Mapping[str, Tensor]) -> None:
        if self._member is not None:
            return
        device = _device_of(policy)
        backend: Backend = "nccl" if device.type == "cuda" else "gloo"
        self._member = member = Communicator.open(host="127.0.0.1", port=0, size=2, backend=backend, timeout_s=_WIRE_S)
        meeting = member.meeting.model_dump_json()
        self._together("join_trainer", meeting, here=lambda: member.join(device, timeout_s=_WIRE_S))
        with Refitter(self._llm) as refitter:
            self._num_bytes = _bytes_held(refitter.layout())
        self._send(policy)  # the first broadcast connects

    def _send(self, policy: Mapping[str, Tensor]) -> None:
        member, num_bytes = self._member, self._num_bytes
        assert member is not None, "it has joined"
        device = _device_of(policy)
        self._together("receive_bytes", num_bytes, here=lambda: broadcast_bytes(member, device, num_bytes))

    def _leave(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            self._together("leave_trainer", here=member.abort)

    def _together(self, method: str, *args: object, here: Callable[[], object]) -> None:
        """Do something on both sides."""
        with ThreadPoolExecutor(1) as pool:
            called = pool.submit(self._llm.collective_rpc, method, args=args)
            here()
            called.result()


def _device_of(policy: Mapping[str, Tensor]) -> torch.device:
    return next(iter(policy.values())).device


def _bytes_held(layout: EngineLayout) -> int:
    """Bytes of all weights and scales of a layout."""
    total = 0
    for slot in layout.slots:
        total += prod(slot.shape) * getattr(torch, slot.dtype).itemsize
        if slot.format is not None:
            total += prod(slot.format.scale_shape(slot.shape)) * slot.format.scale_format.dtype.itemsize
    return total


def by_calls(worker: Any, *, is_online: bool) -> Iterator[Strategy]:
    """Yield the ways of a trainer in the worker's process; vLLM's own only if the engine takes BF16 weights."""

    def send(how: How, policy: Mapping[str, Tensor]) -> None:
        load(worker, how, ([item] for item in policy.items()))

    what = "one tensor a call of `load_weights`, as TRL sends them"
    for how in (How.DROP_IN, *([How.OWN] if is_online else [])):
        yield _strategy(how, "tensors", what, partial(send, how), partial(switch, worker))


def by_buckets(llm: Any, *, is_online: bool) -> Iterator[Strategy]:
    """Yield the ways of a trainer in another process on the same GPU; vLLM's own only if the engine takes BF16 weights."""
    senders: dict[int, _Sender] = {}

    def send(how: How, num_bytes: int, policy: Mapping[str, Tensor]) -> None:
        if num_bytes not in senders:
            senders[num_bytes] = _Sender(num_bytes)
        with tempfile.TemporaryDirectory(prefix="fp8refit-") as folder:
            address = f"ipc://{folder}/policy"
            with ThreadPoolExecutor(1) as pool:
                sent = pool.submit(senders[num_bytes].send, address, policy)
                llm.collective_rpc("receive_policy", args=(str(how), address))
                sent.result()

    def switch_there(how: How) -> None:
        llm.collective_rpc("switch_transfer", args=(str(how),))

    for label, num_bytes in _BUCKETS.items():
        what = f"buckets of {num_bytes >> 20} MiB by CUDA IPC, as verl sends them"
        for how in How:
            if how is not How.OWN or is_online:
                yield _strategy(how, label, what, partial(send, how, num_bytes), switch_there)


def _strategy(how: How, label: str, what: str, update: Update, switch_to: Callable[[How], object]) -> Strategy:
    return Strategy(
        name=f"{how}-{label}",
        summary=f"{_SAID[how]} {what}",
        update=update,
        prepare=lambda _: switch_to(how),
        undo=partial(switch_to, How.NONE),
        loads=Loads.NOTHING if how is How.NONE else Loads.POLICY,
        is_on_request=True,
        num_untimed=_DROP_IN_UNTIMED if how is How.DROP_IN else 0,
    )
