"""Where a vLLM worker has its LoRA adapters.

vLLM may drop its copy of one in host memory, and would load the files again. So what was refitted is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fp8refit.tracing.loras import AdapterMemory, Loaded, Matrices, tried
from fp8refit_vllm.compat import keep_adapter, on_adapter_load, peft_modules

_NOTE = "_fp8refit_note"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Note:
    """What vLLM knows of an adapter only while it loads it."""

    name: str
    request: Any
    modules: Mapping[str, str]
    """PEFT's names of modules by vLLM's."""
    scales: Mapping[str, float]
    """By what `lora_B` of each module will be multiplied."""


def watch_loads(worker: Any) -> None:
    """Note names and scales of adapters that are loaded from now on. May be repeated."""
    on_adapter_load(worker, _note)


def _note(loader: Any, request: Any, lora: Any) -> None:
    modules = peft_modules(loader, request, lora)
    scales = {module: float(weights.scaling) for module, weights in lora.loras.items()}
    setattr(lora, _NOTE, _Note(name=request.lora_name, request=request, modules=modules, scales=scales))


class WorkerAdapters(AdapterMemory):
    """The adapters of a worker.

    Args:
        worker: A vLLM worker whose model is loaded.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def _manager(self) -> Any:
        """The worker's `LoRAModelManager`; None if it serves no adapters."""
        return getattr(getattr(self._worker.model_runner, "lora_manager", None), "_adapter_manager", None)

    @override
    def loaded(self) -> list[Loaded]:
        manager = self._manager
        seats = [] if manager is None else manager.lora_index_to_id
        loras = {} if manager is None else manager.list_adapters()
        return [
            Loaded(name=note.name, lora=lora, index=seats.index(number) if number in seats else None)
            for number, lora in loras.items()
            if (note := getattr(lora, _NOTE, None)) is not None
        ]

    @override
    def seated(self) -> list[Any]:
        manager = self._manager
        return [] if manager is None else [manager.list_adapters().get(number) for number in manager.lora_index_to_id]

    @override
    def matrices_of(self, adapter: Loaded) -> Matrices:
        """Those of layers that have `set_lora`, which fills a slot."""
        manager, lora = self._manager, adapter.lora
        note: _Note = getattr(lora, _NOTE)
        held, stacked, scales = dict[str, Tensor](), dict[str, Tensor](), dict[str, float | None]()
        layers = [(name, layer, manager._get_lora_layer_weights(lora, name)) for name, layer in manager.modules.items()]
        layers = [each for each in layers if each[2]]
        for name, layer, weights in layers:
            parts = manager.packed_modules.get(name, [name])
            for side, matrices in (("A", weights.lora_a), ("B", weights.lora_b)):
                for place, matrix in enumerate(_listed(matrices)):
                    if matrix is not None:
                        part = parts[place] if len(parts) == len(_listed(matrices)) else f"{name}.{place}"
                        key = f"{note.modules.get(part, part)}.lora_{side}.weight"
                        held[key] = matrix
                        scales |= {key: note.scales.get(part)} if side == "B" else {}
                stacks = _listed(getattr(layer, f"lora_{side.lower()}_stacked", ()))
                stacked |= {f"{name} {side}{place}": stack for place, stack in enumerate(stacks)}

        def fill() -> None:
            for _, layer, weights in layers:
                layer.set_lora(adapter.index, weights.lora_a, weights.lora_b)

        return Matrices(held=list(held.items()), stacked=stacked, fill=fill, scales=scales)

    @override
    @torch.inference_mode()
    def activate(self) -> None:
        manager = self._manager
        for number in [] if manager is None else manager.list_adapters():
            if None in manager.lora_index_to_id and number not in manager.lora_index_to_id:
                with tried(f"adapter {number}"):
                    manager.activate_adapter(number)
                manager._last_mapping = None  # of requests to slots, which some versions take for unchanged

    @override
    def deactivate(self) -> None:
        manager = self._manager
        for number in [] if manager is None else [each for each in manager.lora_index_to_id if each is not None]:
            manager.deactivate_adapter(number)
            manager._last_mapping = None

    @override
    def keep(self, lora: Any) -> None:
        keep_adapter(self._worker, getattr(lora, _NOTE).request, lora)


def _listed(matrices: Any) -> list[Any]:
    """A layer's matrices, of which fused ones have several."""
    return [matrices] if isinstance(matrices, Tensor) else list(matrices)
