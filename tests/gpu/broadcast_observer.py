"""What a worker of vLLM's does beside a refit: receive bytes that are nothing but bytes, to tell the rate of the wire."""

import logging
import time

import torch
from live_model import Observer

from fp8refit.transport.collective.communicator import Communicator, Meeting

logging.basicConfig(format="%(message)s")
for side in ("sender", "receiver"):
    logging.getLogger(f"fp8refit.{side}").setLevel(logging.DEBUG)

TIMEOUT_S = 60.0
NUM_BROADCASTS = 8


def broadcast_rate(member: Communicator, device: torch.device, num_bytes: int) -> float:
    """Bytes a second of broadcasts back to back, as this member sees them; every member calls it."""
    buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    torch.cuda.synchronize(device)
    for buffer in buffers:  # the first connects
        member.wait(member.broadcast(buffer, timeout_s=TIMEOUT_S), timeout_s=TIMEOUT_S)
    member.agree(None, timeout_s=TIMEOUT_S)
    start_s = time.perf_counter()
    transfers = [member.broadcast(buffers[place % 2], timeout_s=TIMEOUT_S) for place in range(NUM_BROADCASTS)]
    for transfer in transfers:
        member.wait(transfer, timeout_s=TIMEOUT_S)
    seconds = time.perf_counter() - start_s
    member.agree(None, timeout_s=TIMEOUT_S)
    return NUM_BROADCASTS * num_bytes / seconds


class BroadcastObserver(Observer):
    """For `worker_extension_cls`."""

    def observe_broadcast_rate(self, meeting: str, first_rank: int, num_bytes: int) -> float:
        """Join a group of the trainer's, and see how fast it broadcasts."""
        device = next(self.model_runner.get_model().parameters()).device
        member = Communicator.find(Meeting.model_validate_json(meeting), first_rank + self.rank, timeout_s=TIMEOUT_S)
        member.join(device, timeout_s=TIMEOUT_S)
        try:
            return broadcast_rate(member, device, num_bytes)
        finally:
            member.abort()
