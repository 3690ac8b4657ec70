"""Where an SGLang scheduler has its LoRA adapters.

SGLang joins the matrices of modules that are one for it when it has read the files, and keeps what it made, in host memory.
What belongs to which matrix of the files is traced. Slots are filled from there; `lora_B` is not multiplied, products are.
"""

from collections.abc import Callable
from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fp8refit.live.names import strip_wrappers
from fp8refit.live.slots import TensorMeta
from fp8refit.tracing.boxes import pieces_of, written_by
from fp8refit.tracing.loras import AdapterMemory, Loaded, Matrices, tried
from fp8refit.tracing.stored import box_of
from fp8refit.tracing.trace import Trace
from fp8refit_sglang.compat import empty_slot, num_stages
from fp8refit_sglang.live_scheduler import Scheduler

_NOTE = "_fp8refit_note"
_UNLOADED = "may be unloaded by SGLang, which would load its files again; boot without max_loaded_loras"
_OF_STAGES = "is spread over the stages of a pipeline; boot without pp_size, or merge it into the weights"


def note_load(original: Callable[..., Any], adapter: Any) -> Any:
    """Wraps the method that joins the matrices of an adapter: notes what they were, layer by layer. Those that came as tensors
    of the trainer are still its own, so they are copied: refits write here.
    """
    for layer in adapter.layers:
        layer.weights |= {name: matrix.clone() for name, matrix in layer.weights.items() if matrix.is_shared()}
    noted = [{name: TensorMeta.of(matrix) for name, matrix in layer.weights.items()} for layer in adapter.layers]
    object.__setattr__(adapter, _NOTE, noted)
    return original(adapter)


class PooledAdapters(AdapterMemory):
    """The adapters of a scheduler.

    Args:
        scheduler: The scheduler.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def _manager(self) -> Any:
        return self._scheduler.lora_manager

    @override
    def loaded(self) -> list[Loaded]:
        manager = self._manager
        loras = [] if manager is None else [(ref, manager.loras[uid]) for uid, ref in manager.lora_refs.items()]
        arguments = self._scheduler.itself.server_args
        why = _UNLOADED if getattr(arguments, "max_loaded_loras", None) is not None else ""
        why = _OF_STAGES if num_stages(arguments) > 1 else why
        return [
            Loaded(
                name=ref.lora_name,
                lora=lora,
                index=manager.memory_pool.uid_to_buffer_id.get(ref.lora_id),
                refusal=why,
            )
            for ref, lora in loras
            if hasattr(lora, _NOTE)
        ]

    @override
    def seated(self) -> list[Any]:
        manager = self._manager
        return [] if manager is None else [manager.loras.get(uid) for uid in manager.memory_pool.buffer_id_to_uid]

    @override
    def matrices_of(self, adapter: Loaded) -> Matrices:
        """Those of layers.

        Raises:
            ValueError: SGLang joins some in a way that is not known.
        """
        manager, lora = self._manager, adapter.lora
        held = _parts_of(lora)
        pool = copy(manager.memory_pool)
        pool.pin_memory_available = False  # a pinned copy is another tensor
        stacked = {
            f"layers.{index}.{module} {side}": stack
            for side, buffers in (("A", pool.A_buffer), ("B", pool.B_buffer))
            for module, stacks in buffers.items()
            for index, stack in enumerate(stacks)
        }

        def fill() -> None:
            modules = manager.lora_modules, manager.embed_tokens_module, manager.lm_head_module
            pool.load_lora_weight_to_buffer(lora.uid, adapter.index, lora, *modules)

        scales = {name: 1.0 for name, _ in held if ".lora_B." in name}
        return Matrices(held=held, stacked=stacked, fill=fill, scales=scales, factor=float(lora.scaling))

    @override
    @torch.inference_mode()
    def activate(self) -> None:
        manager = self._manager
        for uid in [] if manager is None else list(manager.lora_refs):
            pool = manager.memory_pool
            if uid not in pool.uid_to_buffer_id and empty_slot() in pool.buffer_id_to_uid:
                with tried(f"adapter {uid}"):
                    manager.fetch_new_loras({uid})

    @override
    def deactivate(self) -> None:
        manager = self._manager
        if manager is None or self._scheduler.draft_algorithm == "UNO":  # whose adapter is seated once
            return
        for uid in list(manager.memory_pool.uid_to_buffer_id):
            if uid is not None:  # requests without an adapter
                pool = manager.memory_pool
                pool.buffer_id_to_uid[pool.uid_to_buffer_id.pop(uid)] = empty_slot()
                pool.eviction_policy.remove(uid)

    @override
    def keep(self, lora: Any) -> None:
        """SGLang drops nothing, and has pinned copies only of adapters that are refused."""


def _parts_of(lora: Any) -> list[tuple[str, Tensor]]:
    """Which part of what SGLang holds in host memory is which matrix of an adapter's files, and which parts are zeros.

    Raises:
        ValueError: See `PooledAdapters.matrices_of`.
    """
    trace, noted = Trace(), getattr(lora, _NOTE)
    again = copy(lora)
    again.__dict__["_modules"] = {}
    again.layers = [
        SimpleNamespace(weights={name: trace.source(name, meta) for name, meta in n.items()}) for n in noted
    ]
    with torch.no_grad(), trace:
        again._normalize_weights()
    held = list(lora.embedding_layers.items())
    shapes = {name: meta.shape for layer in noted for name, meta in layer.items()}
    for layer, joined in zip(lora.layers, again.layers, strict=True):
        for name, tensor in joined.weights.items():
            whole = layer.weights[name]
            for places in trace.places_of(tensor):
                if places.source:
                    pieces = pieces_of(places, tuple(tensor.shape), shapes[places.source]) or ()
                    boxes = [piece.into for piece in pieces]
                else:
                    boxes = written_by(places, tuple(tensor.shape)) or []
                held += [(places.source, box_of(whole, box, range(whole.ndim))) for box in boxes]
    found = {name for name, part in held if tuple(part.shape) == shapes.get(name)}
    if lost := shapes.keys() - found:
        raise ValueError(f"SGLang joins {min(lost)} with others in a way that is not known")
    return [(strip_wrappers(name), part) for name, part in held]
