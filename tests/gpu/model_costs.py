"""What fp8refit makes of a live model, seen from inside its process: what looking at its loader costs, and which rule each
tensor falls under that it holds beside its parameters.
"""

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from harness import timed
from torch import Tensor, nn

from fp8refit.live.held import Holdings
from fp8refit.live.slots import Inventory, Refusal
from fp8refit.ranks.target import Target
from fp8refit.tracing.twin import Twin

NUM_LOOKS = 2


def cost_of_tracing(
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
        proof_s, proof_bytes, layout = timed(target.layout)
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


def holdings(model: nn.Module, build_twin: Callable[[], AbstractContextManager[nn.Module]]) -> dict:
    """Seconds of a search, and the tensors, one of each kind with the number of its like."""
    start_s = time.perf_counter()
    held_now = Holdings(model)
    found = held_now.search()
    searched_s = time.perf_counter()
    has_changed = held_now.have_changed()
    looked_s = time.perf_counter()
    with build_twin() as twin:
        values = {held.name: held.tensor for held in Holdings(twin).search()}
    parameters = {id(p) for p in model.parameters()}
    names = {storage_of(p): name for name, p in model.named_parameters()}
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    kinds: dict[tuple, dict] = {}
    for held in found:
        if id(held.tensor) in parameters:
            continue
        is_buffer = any(held.tensor is buffer for buffer in dict(model.named_modules())[held.module]._buffers.values())
        rule = rule_of(held.tensor, names, values.get(held.name))
        kind = (classes[held.module], re.sub(r"\d+", "N", held.path), rule)
        first = kinds.setdefault(kind, {"count": 0, "module": held.module, **described(held.tensor)})
        first["count"] += 1
        first |= {"class": kind[0], "path": held.path, "rule": rule, "is_buffer": is_buffer}
    return {
        "search_s": searched_s - start_s,
        "look_s": looked_s - searched_s,
        "has_changed": has_changed,
        "num_found": len(found),
        "kinds": list(kinds.values()),
    }


def rule_of(tensor: Any, names: dict[int, str], built: Any) -> str:
    place = storage_of(tensor)
    if place in names:
        return f"shares memory with {names[place]}"
    if built is None:
        return "not on the twin"
    if not isinstance(built, Tensor) or built.is_meta:
        return "on the twin, without values"
    if (built.shape, built.dtype) != (tensor.shape, tensor.dtype):
        return f"on the twin as {built.dtype} {list(built.shape)}"
    mine, theirs = tensor.detach().cpu().double(), built.detach().cpu().double()
    if torch.equal(mine, theirs):
        return "equals the twin's"
    return f"differs from the twin's by up to {float((mine - theirs).abs().max())} of {float(theirs.abs().max())}"


def storage_of(tensor: Any) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, AttributeError):
        return None


def described(tensor: Any) -> dict:
    if isinstance(tensor, np.ndarray):
        return {"dtype": f"numpy {tensor.dtype}", "shape": list(tensor.shape), "device": "cpu", "first": []}
    first = [] if tensor.is_meta or not tensor.numel() else tensor.detach().flatten()[:3].float().tolist()
    return {
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "device": str(tensor.device),
        "first": [str(each) for each in first],
    }


def show(found: dict) -> None:
    print({name: value for name, value in found.items() if name != "kinds"})
    for kind in found["kinds"]:
        print(
            f"{kind['count']:5d} {kind['class']} | {kind['module']} | {kind['path']} | {kind['dtype']} {kind['shape']} "
            f"{kind['device']} {'buffer ' if kind['is_buffer'] else ''}| {kind['rule']} | {kind['first']}",
            flush=True,
        )
