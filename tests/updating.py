"""What a trainer does in a worker, or in a scheduler: an update by buckets of some kind, with a fault in one of them."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fp8refit


def update(owner: Any, rank: int, family: str, seed: int, kind: str, fault: str | None = None, **options: Any) -> dict:
    """Update the engine of `owner` from within.

    Args:
        owner: A worker, a scheduler, or a network.
        rank: Which rank it is; `fault` is on rank 0, or on all of them.
        family: Of models.
        seed: Of the policy.
        kind: One of `KINDS`.
        fault: One of `FAULTS` or `KILL`, and the bucket that has it, as `nan 1`.
        **options: Of the update.
    """
    from tests.tiny_models import make_model

    buckets = KINDS[kind](make_model(family, seed).state_dict())
    name, _, place = (fault or "").rpartition(" ")
    try:
        with fp8refit.update(owner, timeout_s=20.0, **options) as update:
            for index, bucket in enumerate(buckets):
                if name and index == int(place):
                    bucket = (FAULTS | KILL)[name](bucket, rank)
                update.load(bucket)
    except Exception as error:  # noqa: BLE001 - an engine's RPC does not bear it
        return {"error": type(error).__name__, "message": str(error)}
    return {"version": update.report.version, "ranks": [one.rank for one in update.report.ranks]}


def in_fours(policy: dict[str, Tensor]) -> list[list[tuple[str, Tensor]]]:
    items = list(policy.items())
    size = -(-len(items) // 4)
    return [items[start : start + size] for start in range(0, len(items), size)]


def lent(items: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are overwritten when the next one is asked for."""
    for name, tensor in items:
        copy = tensor.clone()
        yield name, copy
        copy.fill_(torch.nan)


def by_stages(buckets: list) -> list:
    """What two pipeline stages send, the last one first, each the embedding too."""
    pairs = [pair for bucket in buckets for pair in bucket]
    half = len(pairs) // 2
    return [[pair] for pair in (*pairs[half:], pairs[0], *pairs[:half])]


KINDS = {
    "buckets": in_fours,
    "tensor by tensor": lambda policy: [[item] for item in policy.items()],
    "generator": lambda policy: [lent(list(policy.items()))],
    "generators": lambda policy: [lent(bucket) for bucket in in_fours(policy)],
    "wrapped fp32": lambda policy: [
        [(f"base_model.model.{name}", tensor.float()) for name, tensor in bucket] for bucket in in_fours(policy)
    ],
}


def with_nan(bucket: list, rank: int) -> list:
    return [bucket[0], (bucket[1][0], torch.full_like(bucket[1][1], torch.nan)), *bucket[2:]]


def without_one(bucket: list, rank: int) -> list:
    """Neither the first, which may be tied to the last, nor the last."""
    return [bucket[0], *bucket[2:]]


def broken(bucket: list, rank: int) -> list:
    if rank == 0:
        raise ConnectionError("the trainer is gone")
    return bucket


def broken_generator(bucket: list, rank: int) -> Iterator:
    yield from bucket[:1]
    yield from broken(bucket[1:], rank)


def killed(bucket: list, rank: int) -> list:
    """The last rank of two dies as by the kernel's out-of-memory killer."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return bucket


KILL = {"kill": killed}
FAULTS = {"nan": with_nan, "missing": without_one, "raise": broken, "raise inside": broken_generator}
