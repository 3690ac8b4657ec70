"""LoRA adapters that a vLLM worker has loaded, as slots of its inventory.

A matrix is in two places: where the kernels read it, stacked with those of other adapters, and whole in host memory, from
which vLLM fills a slot again for an adapter that has lost its own. How one becomes the other is traced, as loaders are: it is
what the layers' `set_lora` does. The host's copy is written when a refit is committed.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fp8refit.config import LORA
from fp8refit.errors import LiveTensorMovedError
from fp8refit.fill.fills import Prepared
from fp8refit.live.layout import EngineLayout
from fp8refit.live.names import strip_wrappers
from fp8refit.live.parameters import LiveTensor, Watch
from fp8refit.live.slots import Inventory, LoraAdapter, Slot, dtype_name
from fp8refit.ranks.live_model import are_mapped
from fp8refit.ranks.target import Target
from fp8refit.ranks.write import Write
from fp8refit.report import RankReport
from fp8refit.tracing.boxes import pieces_of
from fp8refit.tracing.trace import Trace
from fp8refit_vllm.compat import on_adapter_load, peft_modules

_NOTE = "_fp8refit_note"
_EMPTY = torch.empty(0)
"""Stands for what an empty slot holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Note:
    """What vLLM knows of an adapter only while it loads it."""

    name: str
    modules: Mapping[str, str]
    """PEFT's names of modules by vLLM's."""
    scales: Mapping[str, float]
    """By what `lora_B` of each module will be multiplied."""


@dataclass(kw_only=True, slots=True)
class Loras:
    """What was read of a worker's adapters."""

    slots: list[Slot] = field(default_factory=list)
    adapters: dict[str, LoraAdapter] = field(default_factory=dict)
    live: tuple[LiveTensor, ...] = ()
    """Which adapter has which slot."""
    copies: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    """The name of each slot, what it holds, and the same in host memory."""

    @torch.inference_mode()
    def write_copies(self, written: Collection[str]) -> None:
        """Make the host's copies of the slots with these names equal to them."""
        for name, weight, copy in self.copies:
            if name in written:
                copy.copy_(weight)


def watch_loads(worker: Any) -> None:
    """Note names and scales of adapters that are loaded from now on. May be repeated."""
    on_adapter_load(worker, _note)


def _note(loader: Any, request: Any, lora: Any) -> None:
    modules = peft_modules(loader, request, lora)
    scales = {module: float(weights.scaling) for module, weights in lora.loras.items()}
    setattr(lora, _NOTE, _Note(name=request.lora_name, modules=modules, scales=scales))


def manager_of(worker: Any) -> Any:
    """Return the worker's `LoRAModelManager`; None if it serves no adapters."""
    return getattr(getattr(worker.model_runner, "lora_manager", None), "_adapter_manager", None)


def deactivate(worker: Any) -> None:
    """Take its slot from every adapter. vLLM fills one again, from host memory, before the next request with the adapter."""
    manager = manager_of(worker)
    for number in [] if manager is None else [each for each in manager.lora_index_to_id if each is not None]:
        manager.deactivate_adapter(number)
        manager._last_mapping = None  # of requests to slots, which some versions take for unchanged


@torch.inference_mode()
def activate(worker: Any) -> None:
    """Give free slots to adapters that have none."""
    manager = manager_of(worker)
    for number in [] if manager is None else manager.list_adapters():
        if None in manager.lora_index_to_id and number not in manager.lora_index_to_id:
            manager.activate_adapter(number)
            manager._last_mapping = None


def read_loras(worker: Any) -> Loras:
    """List the adapters of a worker, and where their matrices are."""
    manager, found = manager_of(worker), Loras()
    if manager is None:
        return found
    holder = _Occupants(manager)
    found.live = tuple(LiveTensor.of(f"adapter in slot {index}", holder, index, holder[index]) for index in holder)
    for number, lora in manager.list_adapters().items():
        note: _Note | None = getattr(lora, _NOTE, None)
        if note is None:
            continue
        if strip_wrappers(f"{LORA}{note.name}.") != f"{LORA}{note.name}.":
            why = "has a name that fp8refit would take for that of a wrapper; load it under another"
            found.adapters[note.name] = LoraAdapter(refusal=why)
        elif number not in manager.lora_index_to_id:
            why = "is loaded, but has no slot now: refit the weights first if they slept, or add it again (add_lora)"
            found.adapters[note.name] = LoraAdapter(refusal=why)
        else:
            _read_lora(manager, manager.lora_index_to_id.index(number), lora, note, found)
    return found


class _Occupants(Mapping[str, Tensor]):
    """A matrix in host memory of the adapter that has a slot now, by the slot's index."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    @override
    def __getitem__(self, index: str) -> Tensor:
        lora = self._manager.list_adapters().get(self._manager.lora_index_to_id[int(index)])
        layers = lora.loras.values() if lora is not None else ()
        return next((matrix for layer in layers for matrix in _listed(layer.lora_a) if matrix is not None), _EMPTY)

    @override
    def __iter__(self) -> Iterator[str]:
        return map(str, range(len(self._manager.lora_index_to_id)))

    @override
    def __len__(self) -> int:
        return len(self._manager.lora_index_to_id)


def _read_lora(manager: Any, index: int, lora: Any, note: _Note, found: Loras) -> None:
    """Add an adapter, and the slots that its `set_lora` fills with copies of its matrices."""
    whole: dict[str, Tensor] = {}
    stacked: dict[str, Tensor] = {}
    scales: dict[str, float | None] = {}
    layers = [(name, layer, manager._get_lora_layer_weights(lora, name)) for name, layer in manager.modules.items()]
    layers = [each for each in layers if each[2]]
    for name, layer, weights in layers:
        parts = manager.packed_modules.get(name, [name])
        for side, matrices in (("A", weights.lora_a), ("B", weights.lora_b)):
            for place, matrix in enumerate(_listed(matrices)):
                if matrix is not None:
                    part = parts[place] if len(parts) == len(_listed(matrices)) else f"{name}.{place}"
                    key = f"{note.modules.get(part, part)}.lora_{side}.weight"
                    whole[key] = matrix
                    scales |= {key: note.scales.get(part)} if side == "B" else {}
            stacks = _listed(getattr(layer, f"lora_{side.lower()}_stacked", ()))
            stacked |= {f"{name} {side}{place}": stack for place, stack in enumerate(stacks)}
    trace = Trace(stacked)  # which objects to the zeros that come first
    for key, matrix in whole.items():
        trace.note(key, matrix)
    with torch.no_grad(), trace:
        for _, layer, weights in layers:
            layer.set_lora(index, weights.lora_a, weights.lora_b)
    pieces = {
        copy: pieces_of(copy, tuple(stacked[copy.parameter].shape), tuple(whole[copy.source].shape))
        for copy in trace.copies
        if copy.source
    }
    known = {key: scale for key, scale in scales.items() if scale is not None}
    odd = whole.keys() - {copy.source for copy in pieces} | {
        copy.source for copy, boxes in pieces.items() if boxes is None
    }
    if odd := odd | (scales.keys() - known.keys()):
        why = f"is held otherwise than in rows and columns, such as {min(odd)}; load one without these matrices"
        found.adapters[note.name] = LoraAdapter(refusal=why)
        return
    for copy, boxes in pieces.items():
        for box in boxes or ():
            name, full = f"{LORA}{note.name}.{copy.source}", whole[copy.source]
            here = _box_of(full, box.read)
            weight = _box_of(stacked[copy.parameter], box.into).view(here.shape)
            offset = tuple(start for start, _ in box.read)
            module = copy.parameter.split()[0]
            found.slots.append(
                Slot(name=name, full_shape=tuple(full.shape), weight=weight, offset=offset, module=module)
            )
            found.copies.append((name, weight, here))
    found.adapters[note.name] = LoraAdapter(
        shapes={key: tuple(matrix.shape) for key, matrix in whole.items()},
        scales=known,
        dtype=dtype_name(next(iter(whole.values())).dtype),
    )


def _listed(matrices: Any) -> list[Any]:
    """A layer's matrices, of which fused ones have several."""
    return [matrices] if isinstance(matrices, Tensor) else list(matrices)


def _box_of(tensor: Tensor, ranges: Iterable[tuple[int, int]]) -> Tensor:
    for dim, (start, length) in enumerate(ranges):
        tensor = tensor.narrow(dim, start, length)
    return tensor


class LoraTarget(Target):
    """A rank that may serve adapters, which its engine moves between requests.

    Args:
        read_inventory: See `Target`.
        worker: The rank's worker.
        read: Returns what was read last of its adapters.
        **options: See `Target`.
    """

    def __init__(
        self, read_inventory: Callable[[], Inventory], *, worker: Any, read: Callable[[], Loras], **options: Any
    ) -> None:
        super().__init__(read_inventory, **options)
        self._worker, self._read = worker, read

    @override
    def layout(self) -> EngineLayout:
        """See `Target.layout`. Adapters that have no slot get free ones, so that they can be refitted."""
        if not self._has_lost_values and are_mapped(self.live.read()):
            activate(self._worker)
        return super().layout()

    @override
    def begin(self, prepared: Prepared) -> Write:
        """See `Target.begin`.

        Raises:
            LiveTensorMovedError: Adapters have moved since the refit was prepared; nothing was written.
        """
        if self.is_current(prepared) and Watch(self._read().live).was_any_replaced():
            self.abandon()
            self.live.forget()
            raise LiveTensorMovedError(
                "the engine has moved adapters since this refit was prepared. Nothing was written; refit again"
            )
        return super().begin(prepared)

    @override
    def finish(self) -> RankReport:
        try:
            return super().finish()
        except LiveTensorMovedError:  # another adapter's slot may have been written
            deactivate(self._worker)
            raise

    @override
    def commit(self, version: int | None = None) -> int:
        written = frozenset(self._torn) if self._read().copies else frozenset()
        committed = super().commit(version)
        self._read().write_copies(written)
        return committed
