"""The codes and scales of a trainer's weights, recomputed when they are not what the weights give.

Fused optimizers, `parameter.data` and other kernels leave no trace, so each forward pass compares by value. One launch compares
and one quantizes all weights that are whole on a device. With FSDP2, each rank quantizes its own rows; ranks that share a
block combine their maxima. FSDP then gathers the codes, one byte per weight, instead of the weights.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8refit.errors import NonFiniteError, PrecisionError
from fp8refit.kernels import Action, Task, WorkTable, compile_table
from fp8refit.kernels.work import source_layout
from fp8refit.live.formats import BlockFormat
from fp8refit.live.slots import SCALE_SUFFIX, Op
from fp8refit.training.precision.products import has_fp8_products
from fp8refit.training.precision.shards import has_fsdp, quantize_shards

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class TrainedWeight:
    """One weight of a trainer, a matrix or a stack, with its codes and scales.

    Attributes:
        name: Checkpoint name.
        codes: All codes, float8_e4m3fn in the weight's shape; None before the first forward pass. With FSDP, the codes that
            were gathered last, in memory that FSDP frees and reuses.
        scale: float32, one grid of blocks per matrix; None before the first forward pass.
        has_fp8_products: Whether the device can multiply such blocks.
        gathers: The module that FSDP gathers the weight for, if it shards it.
    """

    def __init__(
        self, name: str, module: nn.Module, key: str, block_format: BlockFormat, owner: "TrainedWeights"
    ) -> None:
        self.name, self.format = name, block_format
        self.module, self._key, self.owner = module, key, owner
        self._sharded: DTensor | None = None
        self.gathers: Any = None
        self.codes: Tensor | None = None
        self.scale: Tensor | None = None
        self.has_fp8_products = False
        self.local_codes: Tensor | None = None
        """Codes of this rank's rows, zero-padded to what FSDP gathers from every rank. Without FSDP, the same as
        `codes`."""

    @property
    def parameter(self) -> Tensor:
        """The master weight. With FSDP its shard, whether or not the module holds that at the moment."""
        held: Any = self.module._parameters[self._key]
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

    def ensure_fresh(self) -> None:
        """Compare before a product, unless a module around it did; if compiled, only after a step, with a break in the graph.

        Raises:
            PrecisionError: FSDP has not gathered the weight.
        """
        is_compiled = torch.compiler.is_compiling()
        if (self._sharded if is_compiled else self.sharded) is None:
            if self.owner.is_due if is_compiled else self.owner.inside is None:
                self.owner.before_forward((self,))
        elif not is_compiled and hasattr(self.module._parameters[self._key], "placements"):
            raise PrecisionError([f"{self.name}: is not gathered; call the module that fully_shard was called with"])

    def make_room(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return where codes of this rank go. If that is new, scales are 0, which no block has."""
        if self.local_codes is None or self.local_codes.device != device:
            self.local_codes = torch.zeros((*shape,), dtype=torch.uint8, device=device).view(self.format.codes.dtype)
            scale_shape = self.format.scale_shape(self.parameter.shape)
            self.scale = torch.zeros(scale_shape, dtype=self.format.scale_format.dtype, device=device)
            self.has_fp8_products = has_fp8_products(device)
        return self.local_codes

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
        if self.owner.inside is None or self not in self.owner.within(self.owner.inside):
            self.owner.before_forward((self,))
        assert self.local_codes is not None, f"{self.name=} is quantized"
        return (self.local_codes.view(torch.uint8),), None

    def _after_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Take the codes, and give FSDP a tensor to attach the gradient to. That tensor's memory is freed at once."""
        (came,) = gathered
        if self.codes is None or self.codes.untyped_storage()._cdata != came.untyped_storage()._cdata:
            self.codes = came.view(self.format.codes.dtype)[: self.parameter.shape[0]]
        if out is not None:
            return None
        empty = torch.empty(self.parameter.shape, dtype=dtype, device=came.device)
        self.owner.give_back_later(empty)
        return empty, ()


class TrainedWeights:
    """All weights of one model that its engine holds as block FP8.

    Attributes:
        inside: The outermost module that is being called, which has compared its weights; None between calls.
        is_due: Whether any optimizer stepped since the last comparison, which is all that a compiled part can ask.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._begins_sharded = model, has_fsdp(model)
        self.weights: list[TrainedWeight] = []
        self.inside: nn.Module | None = None
        self._parts: dict[nn.Module, tuple[TrainedWeight, ...]] = {}
        self._tables: dict[tuple[TrainedWeight, ...], tuple[object, WorkTable, list[TrainedWeight]]] = {}
        self._empty: list[Tensor] = []
        self._watch_optimizers()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies of the model, without tables, which hold addresses."""
        return vars(self) | {"_tables": {}, "_empty": [], "inside": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._watch_optimizers()

    def _watch_optimizers(self) -> None:
        self.is_due, me = True, weakref.ref(self)

        def note_step(*_: object) -> None:
            if (weights := me()) is not None:
                weights.is_due, weights.inside = True, None

        weakref.finalize(self, register_optimizer_step_post_hook(note_step).remove)

    def add(self, name: str, module: nn.Module, key: str, block_format: BlockFormat) -> TrainedWeight:
        """Add the parameter `key` of `module`."""
        self.weights.append(TrainedWeight(name, module, key, block_format, self))
        return self.weights[-1]

    def watch(self) -> None:
        """Have modules around all weights compare them when called; with FSDP those on which ranks agree, its own.

        A hook has a number of its own, on which torch.compile would specialize each layer that has one.
        """
        for module in self._model.modules():
            if hasattr(module, "reshard"):
                for weight in self.within(module):
                    weight.gathers = module  # the innermost comes last
            if module is self._model or (
                has_fsdp(module) if self._begins_sharded else len(self.within(module)) == len(self.weights)
            ):
                module.register_forward_pre_hook(self._begin, prepend=True)
                module.register_forward_hook(self._end, always_call=True)

    def within(self, module: nn.Module) -> tuple[TrainedWeight, ...]:
        """Return the weights of a part of the model."""
        if module not in self._parts:
            inner = {*module.modules()}
            self._parts[module] = tuple(weight for weight in self.weights if weight.module in inner)
        return self._parts[module]

    def _begin(self, module: nn.Module, inputs: object) -> None:
        """Before a call of `module`: the outermost compares. If it already is inside, an interrupt left it there."""
        if torch.compiler.is_compiling():
            if module is self._model:
                self.before_forward(self.weights)
        elif module is self._model or self.inside in (None, module):
            self.before_forward(self.within(module))
            self.inside = module

    def _end(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if not torch.compiler.is_compiling() and self.inside is module:
            self.inside = None

    def attach(self, weights: Sequence[TrainedWeight]) -> None:
        """Make FSDP gather codes of the weights it shards.

        Raises:
            PrecisionError: `fully_shard` ran after `unify` and has already looked for extensions.
        """
        if self._begins_sharded:
            for weight in weights:
                weight.attach()
        elif has_fsdp(self._model):
            raise PrecisionError(["fully_shard was called after unify; call it before, on the plain model"])

    def give_back_later(self, empty: Tensor) -> None:
        """Free a tensor of which FSDP needs only the shape, once FSDP has made its views of it."""
        for older in self._empty:
            older.untyped_storage().resize_(0)
        self._empty = [empty]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(self, weights: Sequence[TrainedWeight]) -> None:
        """Call `refresh`, except to recompute a pass, which takes the same codes, or in the capture of a CUDA graph."""
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        is_repeated = torch._C._current_graph_task_id() != -1  # a backward pass is under way
        if not (is_captured or is_repeated) or any(weight.local_codes is None for weight in weights):
            self.refresh(weights)

    def refresh(self, weights: Sequence[TrainedWeight] | None = None) -> int:
        """Compare `weights`, or all, with codes and scales by value, and quantize if any differ. Collective with FSDP.

        Returns:
            How many had changed.

        Raises:
            NonFiniteError: Weights hold NaN or Inf; names them.
        """
        chosen = self.weights if weights is None else weights
        self.attach(chosen)
        whole = tuple(weight for weight in (self.weights if self.is_due else chosen) if weight.sharded is None)
        shards = [weight for weight in chosen if weight.sharded is not None]
        with torch.inference_mode(False), torch.no_grad():
            found = [self._quantize_whole(whole)] if whole else []
            with _unsafe_preserve_version_counter(_written(shards)):
                found += [quantize_shards(shards)] if shards else []
        bad, changed = ([weight for pair in found for weight in pair[which]] for which in (0, 1))
        increment_version(_written(changed))  # a backward pass that has saved the old ones is refused
        if bad:
            raise NonFiniteError([weight.name for weight in bad], written=False)
        self.is_due = False
        return len(changed)

    def _quantize_whole(self, weights: tuple[TrainedWeight, ...]) -> tuple[list[TrainedWeight], list[TrainedWeight]]:
        """Compare unsharded weights, and quantize them if any changed. Return those with NaN or Inf, and those changed."""
        table, owners = self._table_of(weights)
        table.launch(check=True, action=Action.COMPARE)
        bad, changed = ({owners[i]: 0 for i in found} for found in (table.bad_tasks(), table.differing_tasks()))
        if changed and not bad:
            with _unsafe_preserve_version_counter(_written(weights)):
                table.launch(check=False)
        return [*bad], [] if bad else [*changed]

    def _table_of(self, weights: tuple[TrainedWeight, ...]) -> tuple[WorkTable, list[TrainedWeight]]:
        """Return the table that quantizes some unsharded weights, and the weight of each task."""
        masters = [weight.local for weight in weights]
        for weight, master in zip(weights, masters, strict=True):
            weight.codes = weight.make_room(master.shape, master.device)
        key = [(m.data_ptr(), source_layout(m)) for m in masters], [t.data_ptr() for t in _written(weights)]
        if weights not in self._tables or key != self._tables[weights][0]:
            devices = {master.device for master in masters}
            if len(devices) != 1 or devices & {torch.device("meta")}:
                listed = ", ".join(sorted(map(str, devices)))
                raise PrecisionError([f"{listed}: all weights must be on one device, with values"])
            tasks = [task for pair in zip(weights, masters, strict=True) for task in _tasks(*pair)]
            owners = [weight for weight, m in zip(weights, masters, strict=True) for _ in _matrices(m)]
            self._tables[weights] = key, compile_table(tasks, devices.pop()), owners
        return self._tables[weights][1:]


def _written(weights: Iterable[TrainedWeight]) -> tuple[Tensor, ...]:
    """What quantizing writes."""
    return tuple(tensor for weight in weights for tensor in (weight.codes, weight.scale) if tensor is not None)


def _matrices(weight: Tensor) -> list[tuple[int, ...]]:
    """The indices of a weight's matrices."""
    return [()] if weight.ndim == 2 else [(index,) for index in range(weight.shape[0])]


def _tasks(weight: TrainedWeight, master: Tensor) -> Iterable[Task]:
    """Return the tasks that quantize a weight into its own tensors."""
    assert weight.codes is not None and weight.scale is not None, f"{weight.name=}"
    for select in _matrices(master):
        yield Task(
            op=Op.QUANTIZE,
            source=master,
            offset=(0, 0),
            select=select,
            target=weight.codes[select],
            scale=weight.scale[select],
            format=weight.format,
        )
