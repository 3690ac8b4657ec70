"""The codes and scales of a trainer's weights, computed when the weights have changed: once a step.

Weights that lie whole on a device are quantized by one launch for all of them. Of weights that FSDP2 shards, each rank
quantizes its own rows; blocks that two ranks share get their maxima from both. FSDP then gathers the codes, one byte a
weight, in the place of the weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional

from fp8refit.errors import NonFiniteError, PrecisionError
from fp8refit.kernels import Task, WorkTable, compile_table
from fp8refit.kernels.reference import E4M3_MAX, block_scales
from fp8refit.precision.products import has_fp8_products
from fp8refit.slots import FP8_DTYPE, SCALE_SUFFIX, Op, ScaleFormat

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """How an engine holds a weight."""

    scale_format: ScaleFormat
    block_size: tuple[int, int]

    @property
    def is_ue8m0(self) -> bool:
        """Whether scales are powers of two."""
        return self.scale_format is ScaleFormat.UE8M0

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scales of a matrix, or of a stack of matrices."""
        *stack, rows, cols = shape
        return (*stack, -(-rows // self.block_size[0]), -(-cols // self.block_size[1]))


class TrainedWeight:
    """One weight of a trainer, a matrix or a stack of them, and what an engine holds of it.

    Attributes:
        name: Checkpoint name.
        codes: All of them, float8_e4m3fn in the shape of the weight, where a forward reads them; None before the first. Under
            FSDP those that were gathered last: memory that comes and goes with FSDP's own.
        scale: float32, for each matrix a grid of blocks; None before the first.
        has_fp8_products: Whether the device multiplies such blocks itself.
    """

    def __init__(
        self, name: str, module: nn.Module, key: str, block_format: BlockFormat, owner: "TrainedWeights"
    ) -> None:
        self.name, self.format = name, block_format
        self._module, self._key, self.owner = module, key, owner
        self._sharded: DTensor | None = None
        self._seen: tuple[int, int] | None = None
        self.codes: Tensor | None = None
        self.scale: Tensor | None = None
        self.has_fp8_products = False
        self.local_codes: Tensor | None = None
        """Codes of this rank's rows, and zeros up to what FSDP gathers of every rank; those of `codes` without FSDP."""

    @property
    def parameter(self) -> Tensor:
        """The master weight; under FSDP its shards, whether the module holds those at the moment or not."""
        held: Any = self._module._parameters[self._key]
        if hasattr(held, "placements"):
            self._sharded = held
        parameter: Tensor = held if self._sharded is None else self._sharded
        return parameter

    @property
    def sharded(self) -> "DTensor | None":
        """`parameter`, if FSDP shards it."""
        self.parameter  # noqa: B018 looks it up
        return self._sharded

    @property
    def local(self) -> Tensor:
        """What this rank holds of the master weight."""
        parameter = self.parameter
        return (parameter if self._sharded is None else self._sharded._local_tensor).detach()

    @property
    def is_stale(self) -> bool:
        """Whether the master weight was written since its codes were computed, or is elsewhere."""
        local = self.local
        return (local.data_ptr(), local._version) != self._seen

    def mark_fresh(self) -> None:
        """Codes are those of the master weight now."""
        local = self.local
        self._seen = local.data_ptr(), local._version
        assert self.scale is not None, f"{self.name=} is quantized"
        self.has_fp8_products = has_fp8_products(self.scale.device)

    def served(self) -> Iterable[tuple[str, Tensor]]:
        """Codes and scales by their checkpoint names; under FSDP the codes as shards."""
        assert self.local_codes is not None and self.scale is not None, f"{self.name=} is quantized"
        codes, sharded = self.local_codes, self.sharded
        if sharded is not None:
            from torch.distributed.tensor import DTensor

            codes = DTensor.from_local(
                codes[: len(sharded._local_tensor)],
                sharded.device_mesh,
                sharded.placements,
                run_check=False,
                shape=sharded.shape,
                stride=sharded.stride(),
            )
        yield self.name, codes
        yield self.name + SCALE_SUFFIX, self.scale

    def attach(self) -> None:
        """Let FSDP gather codes instead of the weight: what it calls an extension, of the tensor that it shards."""
        if self.sharded is None:
            return
        local: Any = self.sharded._local_tensor
        if not hasattr(local, "fsdp_pre_all_gather"):
            local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self._before_gather, self._after_gather

    def _before_gather(
        self, mesh: object, outer_size: object, outer_stride: object, module: object, mp_policy: object
    ) -> tuple[tuple[Tensor, ...], None]:
        """What FSDP gathers: bytes, which every backend sends."""
        self.owner.refresh()
        assert self.local_codes is not None, f"{self.name=} is quantized"
        return (self.local_codes.view(torch.uint8),), None

    def _after_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Take the codes, and give FSDP something to hang the gradient on, whose own memory is given back at once."""
        (came,) = gathered
        if self.codes is None or self.codes.untyped_storage()._cdata != came.untyped_storage()._cdata:
            self.codes = came.view(FP8_DTYPE)[: self.parameter.shape[0]]
        if out is not None:
            return None
        empty = torch.empty(self.parameter.shape, dtype=dtype, device=came.device)
        self.owner.give_back_later(empty)
        return empty, ()


class TrainedWeights:
    """All weights of one model that its engine holds as block FP8."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._begins_sharded = model, has_fsdp(model)
        self.weights: list[TrainedWeight] = []
        self._table: WorkTable | None = None
        self._table_key: object = None
        self._task_names: list[str] = []
        self._empty: list[Tensor] = []

    def __getstate__(self) -> dict[str, Any]:
        """For copies of the model: all but the table, which holds addresses."""
        return vars(self) | {"_table": None, "_table_key": None, "_empty": []}

    def add(self, name: str, module: nn.Module, key: str, block_format: BlockFormat) -> TrainedWeight:
        """Take in the parameter `key` of `module`."""
        self.weights.append(TrainedWeight(name, module, key, block_format, self))
        return self.weights[-1]

    def attach(self) -> None:
        """Let FSDP gather codes, where it shards.

        Raises:
            PrecisionError: FSDP came later than this, and has looked for extensions already.
        """
        if has_fsdp(self._model) and not self._begins_sharded:
            raise PrecisionError(["fully_shard was called after unify; call it before, on the plain model"])
        for weight in self.weights:
            weight.attach()

    def give_back_later(self, empty: Tensor) -> None:
        """Free the memory of a tensor that FSDP wants only the shape of, once FSDP has made its views of it."""
        for older in self._empty:
            older.untyped_storage().resize_(0)
        self._empty = [empty]

    def refresh(self, *, force: bool = False) -> int:
        """Compute codes and scales of the weights that were written since the last time, or of all of them.

        With FSDP a collective call.

        Returns:
            How many weights were quantized.

        Raises:
            NonFiniteError: NaN or Inf; names the weights.
        """
        stale = [weight for weight in self.weights if force or weight.is_stale]
        if not stale:
            return 0
        self.attach()
        with torch.inference_mode(False), torch.no_grad():
            whole = [weight for weight in self.weights if weight.sharded is None]
            shards = [weight for weight in self.weights if weight.sharded is not None]
            bad = self._quantize_whole(whole) if any(w.sharded is None for w in stale) else []
            bad += _quantize_shards(shards) if any(w.sharded is not None for w in stale) else []
        if bad:
            raise NonFiniteError(bad, written=False)
        for weight in stale:
            weight.mark_fresh()
        return len(stale)

    def _quantize_whole(self, weights: Sequence[TrainedWeight]) -> list[str]:
        """Quantize weights that are not sharded, all in one launch; names of those with NaN or Inf."""
        masters = [weight.local for weight in weights]
        key = [(m.data_ptr(), m.shape, m.stride(), m.dtype, m.device) for m in masters]
        if self._table is None or key != self._table_key:
            tasks = [task for pair in zip(weights, masters, strict=True) for task in _tasks(*pair)]
            devices = {task.source.device for task in tasks}
            if len(devices) != 1 or devices & {torch.device("meta")}:
                raise PrecisionError([f"{_listed(devices)}: weights have to lie on one device, with values"])
            self._table, self._table_key = compile_table(tasks, devices.pop()), key
            self._task_names = [weight.name for weight, m in zip(weights, masters, strict=True) for _ in _matrices(m)]
        self._table.launch(check=True)
        return list(dict.fromkeys(self._task_names[index] for index in self._table.bad_tasks()))


def has_fsdp(model: nn.Module) -> bool:
    """Whether FSDP2 shards any part of a model."""
    return any(hasattr(module, "unshard") and hasattr(module, "reshard") for module in model.modules())


def _matrices(weight: Tensor) -> list[tuple[int, ...]]:
    """Indexes of the matrices of a weight."""
    return [()] if weight.ndim == 2 else [(index,) for index in range(weight.shape[0])]


def _tasks(weight: TrainedWeight, master: Tensor) -> Iterable[Task]:
    """What quantizes a weight, into tensors of its own."""
    if weight.codes is None or weight.codes.device != master.device:
        weight.codes = torch.empty(master.shape, dtype=FP8_DTYPE, device=master.device)
        weight.scale = torch.empty(weight.format.grid(master.shape), device=master.device)
        weight.local_codes = weight.codes
    assert weight.scale is not None, f"{weight.name=}"
    for select in _matrices(master):
        yield Task(
            op=Op.QUANTIZE,
            source=master,
            offset=(0, 0),
            select=select,
            target=weight.codes[select],
            scale=weight.scale[select],
            block_size=weight.format.block_size,
            scale_format=weight.format.scale_format,
        )


def _quantize_shards(weights: Sequence[TrainedWeight]) -> list[str]:
    """Quantize this rank's rows of each weight; names of those with NaN or Inf on any rank.

    One collective operation, of a number a block: peak memory beside it is a few fp32 copies of one shard.
    """
    grids = [_own_maxima(weight) for weight in weights]
    for group, members in _by_group(weights).items():
        flat = torch.cat([grids[index].flatten() for index in members])
        torch.distributed.all_reduce(flat, op=torch.distributed.ReduceOp.MAX, group=group)
        for index, part in zip(members, torch.split(flat, [grids[index].numel() for index in members]), strict=True):
            grids[index] = part.view_as(grids[index])
    for weight, amax in zip(weights, grids, strict=True):
        scale = block_scales(amax, weight.format.scale_format)
        if weight.scale is None or weight.scale.device != scale.device:
            weight.scale = scale
        weight.scale.copy_(scale)
        _encode_own_rows(weight)
    bad = torch.stack([~torch.isfinite(amax).all() for amax in grids]).tolist()
    return [weight.name for weight, is_bad in zip(weights, bad, strict=True) if is_bad]


def _by_group(weights: Sequence[TrainedWeight]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for index, weight in enumerate(weights):
        assert weight.sharded is not None, f"{weight.name=}"
        groups.setdefault(weight.sharded.device_mesh.get_group(shard_axis(weight.sharded)), []).append(index)
    return groups


def shard_axis(weight: "DTensor") -> int:
    """The axis of the mesh along which FSDP2 shards rows, or experts.

    Raises:
        ValueError: It is not what FSDP2 alone does.
    """
    axes = [axis for axis, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if (
        len(axes) != 1
        or not weight.placements[axes[0]].is_shard(0)
        or type(weight.placements[axes[0]]).__name__ != "Shard"
    ):
        raise ValueError(
            f"is placed as {weight.placements}; shard it with fully_shard alone, along its first dimension"
        )
    return axes[0]


def _own_rows(weight: TrainedWeight) -> tuple[Tensor, int, int]:
    """This rank's rows, or experts, as fp32 values that were rounded to BF16; the first of them, and how many ranks hold."""
    sharded = weight.sharded
    assert sharded is not None, f"{weight.name=}"
    axis = shard_axis(sharded)
    chunk = -(-sharded.shape[0] // sharded.device_mesh.size(axis))
    first = min(chunk * sharded.device_mesh.get_local_rank(axis), sharded.shape[0])
    local = weight.local
    return (local.to(torch.bfloat16) if local.dtype is torch.float32 else local).float(), first, chunk


def _own_maxima(weight: TrainedWeight) -> Tensor:
    """The largest magnitude of this rank's part of every block: 0 of those that it has nothing of, Inf for NaN."""
    rows, first, _ = _own_rows(weight)
    grid = rows.new_zeros(weight.format.grid(weight.parameter.shape))
    if not rows.numel():
        return grid
    block_n, block_k = weight.format.block_size
    skipped = 0 if rows.ndim == 3 else first % block_n
    last = -(rows.shape[-2] + skipped) % block_n
    padded = functional.pad(rows.abs(), (0, -rows.shape[-1] % block_k, skipped, last))
    *stack, num_rows, num_cols = padded.shape
    blocks = padded.view(*stack, num_rows // block_n, block_n, num_cols // block_k, block_k)
    amax = blocks.amax(dim=(-3, -1))
    start = first if rows.ndim == 3 else first // block_n
    grid[start : start + len(amax)] = torch.where(torch.isfinite(amax), amax, torch.inf)
    return grid


def _encode_own_rows(weight: TrainedWeight) -> None:
    """`fp8refit.kernels.reference.quantize_reference`, with scales of blocks that other ranks hold a part of."""
    rows, first, chunk = _own_rows(weight)
    assert weight.scale is not None, f"{weight.name=}"
    held = weight.local_codes
    if held is None or held.device != rows.device:
        held = torch.zeros((chunk, *rows.shape[1:]), dtype=torch.uint8, device=rows.device).view(FP8_DTYPE)
        weight.local_codes = held
    block_n, block_k = weight.format.block_size
    inverse = torch.ones_like(weight.scale) / weight.scale
    if rows.ndim == 3:
        inverse, first = inverse[first : first + len(rows)], 0
    row_blocks = torch.arange(first, first + rows.shape[-2], device=rows.device) // block_n
    col_blocks = torch.arange(rows.shape[-1], device=rows.device) // block_k
    inverse = inverse.index_select(-2, row_blocks).index_select(-1, col_blocks)
    held[: len(rows)] = (rows * inverse).clamp(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, values)))
