"""What two members of a broadcast do, each in a process of its own on a GPU of its own; `test_collective.py` judges."""

import time

import torch
import torch.distributed

from fp8refit.errors import TransportError
from fp8refit.transport.collective.communicator import Communicator, Meeting

TIMEOUT_S = 30.0


def device_of(rank: int, backend: str) -> torch.device:
    return torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")


def joined(rank: int, backend: str, sections: tuple[int, ...] = ()) -> Communicator:
    """A new group of both, while the ones before may still be there."""
    device = device_of(rank, backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    told = [None]
    if rank == 0:
        member = Communicator.open(
            host="127.0.0.1", port=0, size=2, backend=backend, timeout_s=TIMEOUT_S, sections=sections
        )
        told = [member.meeting.model_dump_json()]
    torch.distributed.broadcast_object_list(told, src=0)
    if rank:
        member = Communicator.find(Meeting.model_validate_json(told[0]), rank, timeout_s=TIMEOUT_S)
    member.join(device, timeout_s=TIMEOUT_S)
    return member


def filled(rank: int, backend: str, value: int, num_bytes: int = 1 << 20) -> torch.Tensor:
    buffer = torch.full((num_bytes,), value, dtype=torch.uint8, device=device_of(rank, backend))
    settle(backend)
    return buffer


def settle(backend: str) -> None:
    if backend == "nccl":
        torch.cuda.synchronize()


def send(member: Communicator, backend: str, value: int) -> int:
    """One broadcast of the trainer's value to all; gives what is there after it."""
    buffer = filled(member.rank, backend, value if member.rank == 0 else 0)
    member.wait(member.broadcast(buffer, timeout_s=TIMEOUT_S), timeout_s=TIMEOUT_S)
    return int(buffer.max())


def repeat(rank: int, backend: str, num_bytes: int) -> tuple[list[int], float]:
    """Broadcasts one behind the other; what came with each, and bytes a second of them."""
    member = joined(rank, backend)
    buffers = [filled(rank, backend, 0, num_bytes) for _ in range(2)]
    seen, transfers, start_s = [], [], 0.0
    for value in range(1, 13):
        if value == 3:
            start_s = time.perf_counter()  # connected by now
        buffer = buffers[value % 2]
        if value > 2:
            member.wait(transfers[value - 3], timeout_s=TIMEOUT_S)
        if rank == 0:
            buffer.fill_(value)
            settle(backend)
        elif value > 2:
            seen.append(int(buffer.max()))
        transfers.append(member.broadcast(buffer, timeout_s=TIMEOUT_S))
    for value in (11, 12):
        member.wait(transfers[value - 1], timeout_s=TIMEOUT_S)
        seen.append(int(buffers[value % 2].max()))
    seconds = time.perf_counter() - start_s
    member.agree(None, timeout_s=TIMEOUT_S)
    member.abort()
    return seen if rank else list(range(1, 13)), 10 * num_bytes / seconds


def alternate(rank: int, backend: str) -> tuple[list[int], float]:
    """Groups that follow each other while the trainer keeps those before; what came, and the longest that leaving took."""
    kept, seen, slowest_s = [], [], 0.0
    for value in range(1, 5):
        if rank and kept:
            start_s = time.perf_counter()
            kept.pop().abort()
            slowest_s = max(slowest_s, time.perf_counter() - start_s)
        kept.append(joined(rank, backend))
        seen.append(send(kept[-1], backend, value))
    torch.distributed.barrier()
    for member in kept:
        member.abort()
    return seen, slowest_s


def give_up(rank: int, backend: str) -> tuple[str, float]:
    """The other gives up while the trainer's broadcasts to all, and to its section, are under way; the trainer's error."""
    member = joined(rank, backend, sections=(0,))
    # More than NCCL sends ahead of who receives: 4 MiB to each of its channels.
    parts = [filled(rank, backend, 1, (1 << 30) if backend == "nccl" else 64 << 20) for _ in range(2)]
    member.wait(member.broadcast(parts[0], sections={0: parts[1]}, timeout_s=TIMEOUT_S), timeout_s=TIMEOUT_S)
    torch.distributed.barrier()
    if rank:
        time.sleep(0.5)
        member.abort("no memory")
        return "", 0.0
    start_s, said = time.perf_counter(), "nothing"
    try:
        member.wait(member.broadcast(parts[0], sections={0: parts[1]}, timeout_s=TIMEOUT_S), timeout_s=TIMEOUT_S)
    except TransportError as error:
        said = str(error)
    settle(backend)
    return said, time.perf_counter() - start_s


def free_bytes(rank: int, backend: str) -> int:
    """Of this member's GPU, once everything that was left had a moment to be given back."""
    time.sleep(1)
    return torch.cuda.mem_get_info(device_of(rank, backend))[0] if backend == "nccl" else 0
