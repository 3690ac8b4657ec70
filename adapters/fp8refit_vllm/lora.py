"""LoRA adapters that a vLLM worker has loaded, as slots of its inventory.

A matrix is in two places: where the kernels read it, stacked with those of other adapters, and whole in host memory, from
which vLLM fills a slot again for an adapter that has lost its own. How one becomes the other is traced, as loaders are: it is
what the layers' `set_lora` does. The host's copy is written when a refit is committed, and kept from then on: vLLM may drop its
own, and would load the files again.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import is_not
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fp8refit.config import LORA
from fp8refit.errors import InvalidSourceError, LiveTensorMovedError
from fp8refit.fill.fills import Prepared
from fp8refit.live.layout import EngineLayout
from fp8refit.live.names import strip_wrappers
from fp8refit.live.slots import Inventory, LoraAdapter, Slot, dtype_name
from fp8refit.ranks.live_model import are_mapped
from fp8refit.ranks.target import Target
from fp8refit.ranks.write import Write
from fp8refit.report import RankReport
from fp8refit.tracing.boxes import pieces_of
from fp8refit.tracing.trace import Trace
from fp8refit_vllm.compat import keep_adapter, on_adapter_load, peft_modules
from fp8refit_vllm.eplb import end_moves

logger = logging.getLogger(__name__)

_NOTE = "_fp8refit_note"
_AGAIN = "Nothing was written; refit again"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Note:
    """What vLLM knows of an adapter only while it loads it."""

    name: str
    request: Any
    modules: Mapping[str, str]
    """PEFT's names of modules by vLLM's."""
    scales: Mapping[str, float]
    """By what `lora_B` of each module will be multiplied."""


@dataclass(kw_only=True, slots=True)
class Loras:
    """What was read of a worker's adapters."""

    slots: list[Slot] = field(default_factory=list)
    adapters: dict[str, LoraAdapter] = field(default_factory=dict)
    seated: list[Any] = field(default_factory=list)
    """The `LoRAModel` in each slot, or None."""
    copies: list[tuple[str, Tensor, Tensor, Any]] = field(default_factory=list)
    """The name of each slot, what it holds, the same in host memory, and the `LoRAModel` of which that is a part."""
    are_stale: bool = False
    """Whether adapters have moved since, and nothing else has."""

    @torch.inference_mode()
    def write_copies(self, worker: Any, written: Collection[str]) -> None:
        """Make the host's copies of the slots with these names equal to them, and keep these copies."""
        for name, weight, copy, lora in self.copies:
            if name in written:
                copy.copy_(weight)
                keep_adapter(worker, getattr(lora, _NOTE).request, lora)


def watch_loads(worker: Any) -> None:
    """Note names and scales of adapters that are loaded from now on. May be repeated."""
    on_adapter_load(worker, _note)


def _note(loader: Any, request: Any, lora: Any) -> None:
    modules = peft_modules(loader, request, lora)
    scales = {module: float(weights.scaling) for module, weights in lora.loras.items()}
    setattr(lora, _NOTE, _Note(name=request.lora_name, request=request, modules=modules, scales=scales))


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
    manager, found = manager_of(worker), Loras(seated=_seated(worker))
    if manager is None:
        return found
    noted = [
        (number, lora, getattr(lora, _NOTE)) for number, lora in manager.list_adapters().items() if hasattr(lora, _NOTE)
    ]
    same = Counter(note.name for _, _, note in noted)
    for number, lora, note in noted:
        why = ""
        if strip_wrappers(f"{LORA}{note.name}.") != f"{LORA}{note.name}.":
            why = "has a name that fp8refit would take for that of a wrapper; load it under another"
        elif same[note.name] > 1:
            why = "is loaded under several ids; remove all but one (remove_lora)"
        elif number not in manager.lora_index_to_id:
            why = "is loaded, but has no slot now: refit the weights first if they slept, or add it again (add_lora)"
        else:
            try:
                _read_lora(manager, manager.lora_index_to_id.index(number), lora, note, found)
            except Exception as error:  # vLLM's layers may do anything
                logger.debug("adapter %s cannot be read", note.name, exc_info=True)
                why = f"cannot be read ({error!r}); load another, and merge this one into the weights"
        if why:
            found.adapters[note.name] = LoraAdapter(refusal=why)
    return found


def _seated(worker: Any) -> list[Any]:
    """The `LoRAModel` in each slot, or None."""
    manager = manager_of(worker)
    return [] if manager is None else [manager.list_adapters().get(number) for number in manager.lora_index_to_id]


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
    slots, copies = list[Slot](), list[tuple[str, Tensor, Tensor, Any]]()
    for copy, boxes in pieces.items():
        for box in boxes or ():
            name, full = f"{LORA}{note.name}.{copy.source}", whole[copy.source]
            here = _box_of(full, box.read)
            weight = _box_of(stacked[copy.parameter], box.into).view(here.shape)
            offset = tuple(start for start, _ in box.read)
            module = copy.parameter.split()[0]
            slots.append(Slot(name=name, full_shape=tuple(full.shape), weight=weight, offset=offset, module=module))
            copies.append((name, weight, here, lora))
    found.slots += slots
    found.copies += copies
    found.adapters[note.name] = LoraAdapter(
        shapes={key: tuple(matrix.shape) for key, matrix in whole.items()},
        scales=known,
        dtype=next((dtype_name(matrix.dtype) for matrix in whole.values()), ""),
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
        self._forget_moved()
        return super().layout()

    @override
    def check_ready(self) -> Inventory:
        """See `Target.check_ready`. What a failed refit has left incomplete may have been removed since."""
        if self.is_dirty:
            self._forget_moved()
        return super().check_ready()

    @override
    def begin(self, prepared: Prepared) -> Write:
        """See `Target.begin`.

        Raises:
            LiveTensorMovedError: Adapters have moved since the refit of one was prepared, or experts; nothing was written.
        """
        if self.is_current(prepared) and prepared.writes:
            end_moves(self._worker)
        if self.is_current(prepared) and prepared.inventory.has_moved():
            self.abandon()
            raise LiveTensorMovedError("the engine has moved experts since this refit was prepared (EPLB). " + _AGAIN)
        if self.is_current(prepared) and prepared.plan is not None:
            kept = frozenset(prepared.plan.kept)
            sent = [name for name, *_ in self._read().copies if name not in kept]
            self._check_seats(sent, f"since this refit was prepared. {_AGAIN}")
        return super().begin(prepared)

    @override
    def finish(self) -> RankReport:
        report = super().finish()
        self._check_written_seats()
        return report

    @override
    def commit(self, version: int | None = None) -> int:
        self._check_written_seats()
        if self._is_whole:
            with self.live.on_device():
                self._read().write_copies(self._worker, self._torn)
        return super().commit(version)

    @override
    def forget_values(self) -> None:
        """See `Target.forget_values`. Slots of adapters are filled again from host memory, so none is incomplete any more."""
        super().forget_values()
        self._torn = {name for name in self._torn if not name.startswith(LORA)}

    @override
    def distrust(self) -> None:
        """See `Target.distrust`. Adapters are not among what others write with the weights."""
        before = frozenset(self._torn)
        super().distrust()
        self._torn = {name for name in self._torn if name in before or not name.startswith(LORA)}

    def _check_written_seats(self) -> None:
        if self._is_whole:
            try:
                self._check_seats(self._torn, "while one was written; add it (add_lora), and refit it again")
            except LiveTensorMovedError:  # another adapter's slot may have been written
                deactivate(self._worker)
                raise

    def _check_seats(self, written: Collection[str], when: str) -> None:
        """Check that adapters have not moved, if any of theirs is among the slots that are written.

        Raises:
            LiveTensorMovedError: They have, and what was prepared is given up.
        """
        if any(name in written for name, *_ in self._read().copies) and self._has_moved:
            self.abandon()
            self._forget_moved()
            raise LiveTensorMovedError(f"the engine has moved adapters {when}")

    @property
    def _has_moved(self) -> bool:
        """Whether any slot is another adapter's than when they were read."""
        return any(map(is_not, self._read().seated, _seated(self._worker)))

    def _forget_moved(self) -> None:
        """Read adapters again next time, if they have moved."""
        if self._has_moved:
            self._read().are_stale = True
            self.live.forget()

    @override
    def _check_kept(self, prepared: Prepared) -> None:
        """See `Target._check_kept`. A sleep takes nothing from adapters: vLLM has them in host memory."""
        try:
            super()._check_kept(prepared)
        except InvalidSourceError as error:
            if problems := [each for each in error.problems if not (self._has_lost_values and each.startswith(LORA))]:
                raise InvalidSourceError(problems) from None
