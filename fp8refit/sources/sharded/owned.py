"""Tensors that only some ranks of a trainer hold: pipeline stages, and experts that are spread over ranks.

The ranks exchange once who holds what. A tensor that all hold is gathered like any other. Otherwise its owners gather it,
and the first of them sends it to the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed
from pydantic import BaseModel
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from fp8refit.live.fingerprint import checksum
from fp8refit.live.slots import TensorMeta, dtype_name
from fp8refit.sources.sharded.batches import Batch, Launch, PartRows, batches, broadcast
from fp8refit.sources.sharded.shards import Part

_NO_LIMIT = 1 << 62


class Holding(BaseModel, frozen=True):
    """What one rank says about a tensor that it holds whole or in part."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placed: str
    device: str
    """Type of the device, such as `cuda`."""

    @classmethod
    def of(cls, part: Part) -> "Holding":
        """Describe a part. Of a plain tensor, which must be the same on every rank, this reads the values."""
        meta = part.meta
        kind = part.local.device.type
        placed = part.placed if part.mesh is not None else f"{part.placed}, checksum {int(checksum(part.local)):x}"
        return cls(name=part.name, shape=meta.shape, dtype=dtype_name(meta.dtype), placed=placed, device=kind)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shared:
    """A tensor and its owners. Other ranks have a part without bytes."""

    part: Part
    owners: tuple[int, ...]


def unite(own: Sequence[Part], said: Sequence[Sequence[Holding]]) -> tuple[list[Shared], list[str]]:
    """Return all tensors that any rank holds, in the same order everywhere, and what is wrong with them.

    Args:
        own: What this rank holds.
        said: What every rank holds, in rank order.
    """
    mine = {part.name: part for part in own}
    holders: dict[str, dict[int, Holding]] = {}
    for rank, holdings in enumerate(said):
        for holding in holdings:
            holders.setdefault(holding.name, {})[rank] = holding
    shared, problems = [], []
    for name, held in holders.items():
        if views := why_differ({rank: f"{one.dtype} {list(one.shape)}, {one.placed}" for rank, one in held.items()}):
            problems.append(f"{name}: {views}")
        else:
            shared.append(Shared(part=mine.get(name) or _absent(next(iter(held.values()))), owners=tuple(held)))
    return shared, problems


def why_differ(views: Mapping[int, str]) -> str:
    """Say what ranks have, by rank; empty if all have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, view in views.items():
        ranks.setdefault(view, []).append(rank)
    told = "; ".join(f"on rank {', '.join(map(str, alike))} {view}" for view, alike in ranks.items())
    return told if len(ranks) > 1 else ""


def _absent(holding: Holding) -> Part:
    meta = TensorMeta(shape=holding.shape, dtype=getattr(torch, holding.dtype))
    return Part(name=holding.name, meta=meta, local=torch.empty(0, dtype=meta.dtype), placed=holding.placed)


def owner_batches(
    shared: Sequence[Shared],
    max_bytes: int,
    group: ProcessGroup,
    said: Sequence[Sequence[Holding]],
    *,
    timeout_s: float,
) -> Iterator[Batch]:
    """Split tensors into batches of about `max_bytes`, in order. Equal on every rank of `group`."""
    kinds = {holding.device for holdings in said for holding in holdings}
    device = torch.device("cuda", torch.cuda.current_device()) if kinds == {"cuda"} else torch.device("cpu")
    size = torch.distributed.get_world_size(group)
    for owners, run in groupby(shared, key=lambda each: each.owners):
        parts = [each.part for each in run]
        if len(owners) == size:
            yield from batches(parts, max_bytes)
            continue
        waiting: list[Part] = []
        num_bytes = 0
        for part in parts:
            if waiting and num_bytes + _num_bytes(part) > max_bytes:
                yield OwnerBroadcast(waiting, owners, group, device, timeout_s=timeout_s)
                waiting, num_bytes = [], 0
            waiting.append(part)
            num_bytes += _num_bytes(part)
        yield OwnerBroadcast(waiting, owners, group, device, timeout_s=timeout_s)


class OwnerBroadcast(Batch):
    """Whole tensors that their first owner sends to all other ranks.

    Peak memory: all of them, and what their owners need to assemble one of their buckets.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        owners: Sequence[int],
        group: ProcessGroup,
        device: torch.device,
        *,
        timeout_s: float,
    ) -> None:
        self._parts, self._group, self._device, self._timeout_s = parts, group, device, timeout_s
        self._source = owners[0]
        self._rank = torch.distributed.get_rank(group)
        self._inner = list(batches(parts, _NO_LIMIT)) if self._rank in owners else []
        self._memory: Tensor | None = None

    @override
    def tensors(self) -> PartRows:
        places, self._memory = self._places(), None
        for part in self._parts:
            yield part, 0, places.pop(part.name)

    @override
    def _communicate(self) -> Iterator[Launch]:
        self._memory = torch.empty(sum(map(_num_bytes, self._parts)), dtype=torch.uint8, device=self._device)
        for batch in self._inner:
            batch.allocate()
        yield self._send

    def _send(self) -> Sequence[Any]:
        """Gather among the owners, who wait for each other, then start sending. When this returns, the data is on its
        way, so nobody waits for a rank that stops here.
        """
        places = self._places()
        assert self._memory is not None, "allocated"
        for batch in self._inner:
            batch.begin()
            batch.finish(self._timeout_s)
            for part, _, tensor in batch.tensors():
                if self._rank == self._source:
                    places[part.name].copy_(tensor)
        return [broadcast(self._memory, self._source, self._group)]

    def _places(self) -> dict[str, Tensor]:
        assert self._memory is not None, "allocated"
        places, start = {}, 0
        for part in self._parts:
            end = start + part.meta.num_bytes
            places[part.name] = self._memory[start:end].view(part.meta.dtype).view(part.meta.shape)
            start += _num_bytes(part)
        return places


def _num_bytes(part: Part) -> int:
    """Size of the whole tensor, including its alignment."""
    return -(-part.meta.num_bytes // 16) * 16
