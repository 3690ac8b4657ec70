"""The codes and scales of a trainer's weights, recomputed once per step, after the weights changed.

One launch quantizes all weights that are whole on a device. With FSDP2, each rank quantizes its own rows; ranks that
share a block combine their maxima. FSDP then gathers the codes, one byte per weight, instead of the weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8refit.errors import NonFiniteError, PrecisionError
from fp8refit.fill.kernels import Task, WorkTable, compile_table
from fp8refit.live.slots import FP8_DTYPE, SCALE_SUFFIX, Op, ScaleFormat
from fp8refit.precision.products import has_fp8_products
from fp8refit.precision.shards import has_fsdp, quantize_shards

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
        """Return the shape of the scales of a matrix or a stack of matrices."""
        *stack, rows, cols = shape
        return (*stack, -(-rows // self.block_size[0]), -(-cols // self.block_size[1]))


class TrainedWeight:
    """One weight of a trainer, a matrix or a stack, with its codes and scales.

    Attributes:
        name: Checkpoint name.
        codes: All codes, float8_e4m3fn in the weight's shape; None before the first forward pass. With FSDP, the codes that
            were gathered last, in memory that FSDP frees and reuses.
        scale: float32, one grid of blocks per matrix; None before the first forward pass.
        has_fp8_products: Whether the device can multiply such blocks.
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
        """Codes of this rank's rows, zero-padded to what FSDP gathers from every rank. Without FSDP, the same as
        `codes`."""

    @property
    def parameter(self) -> Tensor:
        """The master weight. With FSDP its shard, whether or not the module holds that at the moment."""
        held: Any = self._module._parameters[self._key]
        if hasattr(held, "placements"):
            self._sharded = held
        parameter: Tensor = held if self._sharded is None else self._sharded
        return parameter

    @property
    def sharded(self) -> "DTensor | None":
        """`parameter` if FSDP shards it."""
        self.parameter  # noqa: B018 looks it up
        return self._sharded

    @property
    def local(self) -> Tensor:
        """This rank's part of the master weight."""
        parameter = self.parameter
        return (parameter if self._sharded is None else self._sharded._local_tensor).detach()

    @property
    def is_stale(self) -> bool:
        """Whether the master weight was written or moved since its codes were computed."""
        local = self.local
        return (local.data_ptr(), local._version) != self._seen

    def mark_fresh(self) -> None:
        """Record that the codes match the master weight."""
        local = self.local
        self._seen = local.data_ptr(), local._version
        assert self.scale is not None, f"{self.name=} is quantized"
        self.has_fp8_products = has_fp8_products(self.scale.device)

    def served(self) -> Iterable[tuple[str, Tensor]]:
        """Yield codes and scales by checkpoint name. With FSDP, codes are shards."""
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
        """Make FSDP gather codes instead of the weight, through an extension of the tensor that it shards."""
        if self.sharded is None:
            return
        local: Any = self.sharded._local_tensor
        if not hasattr(local, "fsdp_pre_all_gather"):
            local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self._before_gather, self._after_gather

    def _before_gather(
        self, mesh: object, outer_size: object, outer_stride: object, module: object, mp_policy: object
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return what FSDP gathers: bytes, which every backend can send."""
        self.owner.refresh()
        assert self.local_codes is not None, f"{self.name=} is quantized"
        return (self.local_codes.view(torch.uint8),), None

    def _after_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Take the codes, and give FSDP a tensor to attach the gradient to. That tensor's memory is freed at once."""
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
        """Return the state for copies of the model, without the table, which holds addresses."""
        return vars(self) | {"_table": None, "_table_key": None, "_empty": []}

    def add(self, name: str, module: nn.Module, key: str, block_format: BlockFormat) -> TrainedWeight:
        """Add the parameter `key` of `module`."""
        self.weights.append(TrainedWeight(name, module, key, block_format, self))
        return self.weights[-1]

    def attach(self) -> None:
        """Make FSDP gather codes of the weights it shards.

        Raises:
            PrecisionError: `fully_shard` ran after `unify` and has already looked for extensions.
        """
        if has_fsdp(self._model) and not self._begins_sharded:
            raise PrecisionError(["fully_shard was called after unify; call it before, on the plain model"])
        for weight in self.weights:
            weight.attach()

    def give_back_later(self, empty: Tensor) -> None:
        """Free a tensor of which FSDP needs only the shape, once FSDP has made its views of it."""
        for older in self._empty:
            older.untyped_storage().resize_(0)
        self._empty = [empty]

    def refresh(self, *, force: bool = False) -> int:
        """Compute codes and scales of the weights that changed since the last time, or of all.

        A collective call with FSDP.

        Returns:
            How many weights were quantized.

        Raises:
            NonFiniteError: Weights hold NaN or Inf; names them.
        """
        stale = [weight for weight in self.weights if force or weight.is_stale]
        if not stale:
            return 0
        self.attach()
        with torch.inference_mode(False), torch.no_grad():
            whole = [weight for weight in self.weights if weight.sharded is None]
            shards = [weight for weight in self.weights if weight.sharded is not None]
            bad = self._quantize_whole(whole) if any(w.sharded is None for w in stale) else []
            bad += quantize_shards(shards) if any(w.sharded is not None for w in stale) else []
        if bad:
            raise NonFiniteError(bad, written=False)
        for weight in stale:
            weight.mark_fresh()
        return len(stale)

    def _quantize_whole(self, weights: Sequence[TrainedWeight]) -> list[str]:
        """Quantize unsharded weights in one launch. Return the names of those with NaN or Inf."""
        masters = [weight.local for weight in weights]
        key = [(m.data_ptr(), m.shape, m.stride(), m.dtype, m.device) for m in masters]
        if self._table is None or key != self._table_key:
            tasks = [task for pair in zip(weights, masters, strict=True) for task in _tasks(*pair)]
            devices = {task.source.device for task in tasks}
            if len(devices) != 1 or devices & {torch.device("meta")}:
                raise PrecisionError([f"{_listed(devices)}: all weights must be on one device, with values"])
            self._table, self._table_key = compile_table(tasks, devices.pop()), key
            self._task_names = [weight.name for weight, m in zip(weights, masters, strict=True) for _ in _matrices(m)]
        self._table.launch(check=True)
        return list(dict.fromkeys(self._task_names[index] for index in self._table.bad_tasks()))


def _matrices(weight: Tensor) -> list[tuple[int, ...]]:
    """The indices of a weight's matrices."""
    return [()] if weight.ndim == 2 else [(index,) for index in range(weight.shape[0])]


def _tasks(weight: TrainedWeight, master: Tensor) -> Iterable[Task]:
    """Return the tasks that quantize a weight into its own tensors."""
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


def _listed(values: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, values)))
