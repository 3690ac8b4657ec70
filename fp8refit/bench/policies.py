"""Weights for any engine: random, from a seed, with outlier channels like real ones."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from fp8refit.driver.refitter import Refitter
from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.layout import EngineLayout
from fp8refit.live.slots import TensorMeta

NUM_OUTLIERS = 6
_EXPERT = re.compile(r"(?P<module>.*\.experts)\.(?P<number>\d+)\.(?P<leaf>gate_proj|up_proj|down_proj)\.weight")
_STACKS = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)}
"""For each matrix of an expert: the tensor of a transformers state dict that holds it, and its place there."""


def manifest(layout: EngineLayout) -> dict[str, TensorMeta]:
    """Return shapes and dtypes of a policy for an engine: float32 where the engine keeps float32, else BF16."""
    return {
        slot.name: TensorMeta(
            shape=tuple(slot.full_shape), dtype=torch.float32 if slot.dtype == "float32" else torch.bfloat16
        )
        for slot in layout.slots
    }


def manifest_of(candidate: object) -> dict[str, TensorMeta]:
    """Return `manifest` for an engine.

    Raises:
        UnsupportedEngineError: Some of its weights cannot be described.
    """
    with Refitter(candidate) as refitter:
        layout = refitter.layout()
    if layout.refusals:
        raise UnsupportedEngineError("this engine cannot be given a policy:", layout.refusals)
    return manifest(layout)


def allocate(layout: EngineLayout, device: torch.device) -> dict[str, Tensor]:
    """Allocate one policy. The experts of a layer lie side by side, as transformers has them: see `stacked`."""
    metadata = manifest(layout)
    numbers: dict[str, set[int]] = defaultdict(set)
    for found in filter(None, map(_EXPERT.fullmatch, metadata)):
        numbers[found["module"]].add(int(found["number"]))
    made: dict[str, Tensor] = {}
    stacks: dict[tuple[str, str], Tensor] = {}
    for name, meta in metadata.items():
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            made[name] = _empty(meta, device)
            continue
        stack, place = _STACKS[expert["leaf"]]
        shape = (len(numbers[expert["module"]]), 1 + (stack == "gate_up_proj"), *meta.shape)
        key = (expert["module"], stack)
        if key not in stacks:
            stacks[key] = torch.empty(shape, dtype=meta.dtype, device=device)
        made[name] = stacks[key][int(expert["number"]), place]
    return made


def stacked(policy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same memory of a policy from `allocate` under the names of a transformers state dict, experts stacked."""
    found: dict[str, Tensor] = {}
    for name, tensor in policy.items():
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            found[name] = tensor
        elif tensor._base is not None:
            whole = tensor._base
            stack, _ = _STACKS[expert["leaf"]]
            found[f"{expert['module']}.{stack}"] = whole.view(len(whole), -1, tensor.shape[-1])
    return found


def fill(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Write policy number `seed` in place, as an optimizer does."""
    for index, tensor in enumerate(tensors.values()):
        _fill_one(tensor, seed, index)
    return tensors


def stream(metadata: Mapping[str, TensorMeta], seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of policy number `seed`, each created on request, in case they do not all fit beside the
    engine.
    """
    for index, (name, meta) in enumerate(metadata.items()):
        tensor = _empty(meta, device)
        _fill_one(tensor, seed, index)
        yield name, tensor


def in_buckets(named: Iterable[tuple[str, Tensor]], max_bytes: int | None) -> Iterator[list[tuple[str, Tensor]]]:
    """Pack tensors, in order, into buckets of at most `max_bytes`, or into one. A larger tensor gets a bucket of its own."""
    bucket: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in named:
        if bucket and max_bytes is not None and num_bytes + tensor.nbytes > max_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor))
        num_bytes += tensor.nbytes
    yield bucket


def _empty(meta: TensorMeta, device: torch.device) -> Tensor:
    return torch.empty(meta.shape, dtype=meta.dtype, device=device)


def _fill_one(tensor: Tensor, seed: int, index: int) -> None:
    generator = torch.Generator(tensor.device).manual_seed(seed * 100_003 + index)
    if tensor.ndim < 2 or not tensor.numel():
        tensor.normal_(1.0, 0.05, generator=generator)
        return
    tensor.normal_(0.0, 0.02, generator=generator)
    channels = torch.randint(tensor.shape[-1], (NUM_OUTLIERS,), generator=generator, device=tensor.device)
    tensor[..., channels] *= 12
