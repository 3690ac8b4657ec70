"""Which box of a tensor each rank of a trainer holds. Nothing here communicates."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8refit.errors import InvalidSourceError
from fp8refit.live.slots import TensorMeta
from fp8refit.live.storage import why_unreadable

if TYPE_CHECKING:  # takes a second to import; a process with shards has done so already
    from torch.distributed.device_mesh import DeviceMesh

_CPU = torch.device("cpu")


def is_shard(value: object) -> bool:
    """Whether a value of a state dict is a DTensor."""
    return hasattr(value, "full_tensor")


def has_shards(values: Iterable[object]) -> bool:
    """Whether any of `values` is a DTensor. Takes a third of a millisecond for a mixture-of-experts model."""
    return any(hasattr(kind, "full_tensor") for kind in set(map(type, values)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One cut by the trainer: `dim` of the tensor, over the ranks along `axis` of the mesh."""

    axis: int
    dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A box of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def rows(self, first: int, count: int) -> tuple[int, int]:
        """Return the intersection with the `count` rows from `first`: its first row and number of rows."""
        begin = max(first, self.start[0])
        return begin, max(min(first + count, self.start[0] + self.shape[0]) - begin, 0)


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """Which box of a tensor each rank of a mesh holds. Tensors that are cut alike share one layout.

    Rows, columns or experts are cut into as many equal chunks as there are ranks, rounded up. The last ranks hold less,
    or nothing.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    stages: tuple[Stage, ...]
    """In the order of the cuts."""

    def box(self, coordinate: Sequence[int], depth: int) -> Box:
        """Return what the rank at `coordinate` holds after `depth` cuts."""
        start, shape = [0] * len(self.shape), list(self.shape)
        for stage in self.stages[:depth]:
            chunk = self._chunk(shape, stage)
            skipped = min(chunk * coordinate[stage.axis], shape[stage.dim])
            start[stage.dim] += skipped
            shape[stage.dim] = min(chunk, shape[stage.dim] - skipped)
        return Box(start=tuple(start), shape=tuple(shape))

    def padded(self, coordinate: Sequence[int], depth: int) -> tuple[int, ...]:
        """Shape of the largest box that any rank along its axis has after cut number `depth`."""
        shape, stage = list(self.box(coordinate, depth).shape), self.stages[depth]
        shape[stage.dim] = self._chunk(shape, stage)
        return tuple(shape)

    @cached_property
    def num_padded(self) -> int:
        """Elements of the tensor if every rank's box were as large as the first. Equal on every rank."""
        return prod(self.box((0,) * len(self.mesh_shape), len(self.stages)).shape) * prod(
            self.mesh_shape[stage.axis] for stage in self.stages
        )

    def _chunk(self, shape: Sequence[int], stage: Stage) -> int:
        return -(-shape[stage.dim] // self.mesh_shape[stage.axis])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """What one rank holds of one tensor."""

    name: str
    meta: TensorMeta
    """Describes the whole tensor."""
    local: Tensor
    placed: str
    """How the tensor is spread over the trainer's ranks, equal on all of them."""
    mesh: "DeviceMesh | None" = None
    """The ranks it is gathered from; None if all of it is here."""
    device: torch.device = _CPU
    """Where those ranks communicate. Tensors offloaded to the CPU go through buckets there."""
    layout: ShardLayout | None = None
    """None if it is not cut into boxes."""

    @property
    def num_bytes(self) -> int:
        """Bytes it needs in a bucket. Equal on every rank."""
        count = self.layout.num_padded if self.layout is not None else prod(self.meta.shape)
        return count * self.meta.dtype.itemsize


class PartReader:
    """Reads what a state dict holds on this rank. Tensors that are cut alike share one layout; a model has about ten."""

    def __init__(self) -> None:
        self._layouts: dict[Any, ShardLayout | None] = {}
        self._devices: dict[DeviceMesh, torch.device] = {}

    def read(self, name: str, tensor: Any) -> Part:
        """Describe a plain tensor or a DTensor, without communication.

        Raises:
            InvalidSourceError: It cannot be gathered; says why.
        """
        if not is_shard(tensor):
            return Part(name=name, meta=TensorMeta.of(tensor), local=tensor.detach(), placed="whole")
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        meta, placed = TensorMeta.of(tensor), f"{placements} on {tuple(mesh.shape)}"
        with torch.no_grad():
            local = tensor.to_local().detach()
            if hasattr(local, "trigger_wait"):  # it has not arrived on this rank
                local = local.trigger_wait()
        if problem := _what_is_wrong(local, mesh, placements):
            raise InvalidSourceError([f"{name}: {problem}"])
        key = meta.shape, placements, mesh
        if key not in self._layouts:
            self._layouts[key] = _layout_of(meta.shape, mesh, placements)
        layout = self._layouts[key]
        if layout is None:
            return Part(name=name, meta=meta, local=tensor.detach(), placed=placed, mesh=mesh)
        expected = layout.box(mesh.get_coordinate(), len(layout.stages)).shape
        if tuple(local.shape) != expected:
            raise InvalidSourceError(
                [f"{name}: its shard here is {list(local.shape)}, but {placed} implies {list(expected)}"]
            )
        if not layout.stages:
            return Part(name=name, meta=meta, local=local, placed=placed)
        device = local.device if local.device.type == mesh.device_type else self._device_of(mesh)
        return Part(name=name, meta=meta, local=local, placed=placed, mesh=mesh, device=device, layout=layout)

    def _device_of(self, mesh: "DeviceMesh") -> torch.device:
        """The device of a mesh on the current thread; a thread that reads the source may have another current device."""
        if mesh not in self._devices:
            self._devices[mesh] = torch.empty(0, device=mesh.device_type).device
        return self._devices[mesh]


def _layout_of(shape: tuple[int, ...], mesh: "DeviceMesh", placements: Sequence[Any]) -> ShardLayout | None:
    from torch.distributed.tensor import Replicate, Shard

    if not all(type(placement) in (Replicate, Shard) for placement in placements):
        return None
    stages = tuple(
        Stage(axis=axis, dim=placement.dim % len(shape))
        for axis, placement in enumerate(placements)
        if type(placement) is Shard and mesh.shape[axis] > 1
    )
    return ShardLayout(shape=shape, mesh_shape=tuple(mesh.shape), stages=stages)


def _what_is_wrong(local: Tensor, mesh: "DeviceMesh", placements: Sequence[Any]) -> str | None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if problem := why_unreadable(local):
        return problem
    if mesh.get_coordinate() is None:
        return f"lies on {mesh}, which does not include this rank"
    unknown = [
        placement for placement in placements if type(placement) not in (Replicate, Shard, Partial, _StridedShard)
    ]
    if unknown:
        return f"is placed as {unknown[0]}, which fp8refit cannot gather; send tensor.full_tensor()"
    return None
