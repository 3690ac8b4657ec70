"""What looking at a live model's loader costs, by what a rank of either engine reads its slots with."""

import time
from collections.abc import Callable

import torch
from measuring import timed
from torch import nn

from fp8refit.live.slots import Inventory, Refusal
from fp8refit.ranks.target import Target
from fp8refit.tracing.twin import Twin

NUM_LOOKS = 2


def look(
    model: nn.Module, trace: Callable[[], Twin | Refusal], read: Callable[[nn.Module, Twin | Refusal], Inventory]
) -> dict:
    """Trace and prove a model's loader again and again, and give the seconds, the refusals, the bytes of GPU memory that the
    proof takes at most, and those left in use.

    Nothing is collected as garbage in between: what is left is what a trainer would see.
    """
    found: dict = {"left_bytes": [], "trace_s": [], "slots_s": [], "proof_s": [], "proof_bytes": [], "refusals": []}
    for _ in range(NUM_LOOKS):
        held = allocated()
        start_s = time.perf_counter()
        twin = trace()
        traced_s = time.perf_counter()
        inventory = read(model, twin)
        found["slots_s"].append(time.perf_counter() - traced_s)
        found["trace_s"].append(traced_s - start_s)
        target = Target(lambda held=inventory: held, device=next(model.parameters()).device, engine="", versions={})
        layout, proof_s, proof_bytes = timed(target.layout)
        found["proof_s"].append(proof_s)
        found["proof_bytes"].append(proof_bytes)
        found["refusals"] += layout.refusals
        del twin, inventory, target
        found["left_bytes"].append(allocated() - held)
    return found


def allocated() -> int:
    """Bytes that torch holds on this GPU, once it is done with all else."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()
