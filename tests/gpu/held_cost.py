"""What a live model holds beside its parameters, and which rule of fp8refit each tensor falls under."""

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fp8refit.live.held import Holdings


def look(model: nn.Module, build_twin: Callable[[], AbstractContextManager[nn.Module]]) -> dict:
    """Seconds of a search, and the tensors, one of each kind with the number of its like."""
    start_s = time.perf_counter()
    holdings = Holdings(model)
    found = holdings.search()
    searched_s = time.perf_counter()
    has_changed = holdings.have_changed()
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
