"""An engine's slots, kernels, formats and refusals as JSON, printed by `fp8refit inspect` and read by `quantize
--like`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from pydantic import BaseModel, PositiveInt, field_validator

from fp8refit.config import LORA
from fp8refit.errors import by_cause
from fp8refit.live.formats import AmaxOver, BlockFormat, Codes, Container, Placement, ScaleFormat
from fp8refit.live.names import is_kv_scale
from fp8refit.live.slots import Inventory, KvCache, LoraAdapter, Slot, Stacked, dtype_name

_DTYPES = frozenset(dtype_name(value) for value in vars(torch).values() if isinstance(value, torch.dtype))

NO_SCALES = "not FP8: there are no scales to recompute"
"""What is said of another KV cache."""


class SlotLayout(BaseModel, frozen=True):
    """One slot without its storage."""

    name: str
    """Checkpoint name."""
    module: str
    full_shape: tuple[int, ...]
    """Shape of the checkpoint tensor."""
    shape: tuple[int, ...]
    """Shape of the slice held here."""
    offset: tuple[int, ...]
    dtype: str
    """dtype of the live storage, such as `float8_e4m3fn`."""
    scale_format: ScaleFormat | None
    """None if the slot is copied, not quantized."""
    block_size: tuple[PositiveInt, PositiveInt] | None
    amax_over: AmaxOver = AmaxOver.OWN_SLICE
    placement: Placement = Placement.ROW_MAJOR
    codes: Codes = Codes.E4M3
    shared_with: str = ""
    """The first of the tensors that share its scale; empty if the scale is its own."""
    kernel: str
    """Class of the engine kernel that reads it."""
    is_rearranged: bool = False
    """Whether the engine holds it quantized, but not in the checkpoint's order."""

    @property
    def format(self) -> BlockFormat | None:
        """How it is held quantized; None if it is copied."""
        if self.scale_format is None or self.block_size is None:
            return None
        return BlockFormat(
            scale_format=self.scale_format,
            block_size=self.block_size,
            amax_over=self.amax_over,
            placement=self.placement,
            codes=self.codes,
        )

    @classmethod
    def of(cls, slot: Slot, shared_with: str = "") -> Self:
        """Describe `slot`."""
        layout = cls(
            name=slot.name,
            module=slot.module,
            full_shape=slot.full_shape,
            shape=slot.shape,
            offset=slot.origin,
            dtype=dtype_name(slot.weight.dtype),
            scale_format=slot.format.scale_format if slot.format is not None else None,
            block_size=slot.format.block_size if slot.format is not None else None,
            amax_over=slot.format.amax_over if slot.format is not None else AmaxOver.OWN_SLICE,
            placement=slot.format.placement if slot.format is not None else Placement.ROW_MAJOR,
            codes=slot.format.codes if slot.format is not None else Codes.E4M3,
            shared_with=shared_with,
            kernel=slot.kernel,
            is_rearranged=slot.is_rearranged,
        )
        assert layout.format == slot.format, f"{slot.format=} has parts that a layout cannot say"
        return layout

    @field_validator("dtype")
    @classmethod
    def _is_a_dtype(cls, name: str) -> str:
        if name not in _DTYPES:
            raise ValueError(f"{name!r} is not a torch dtype")
        return name


class KvLayout(BaseModel, frozen=True):
    """The KV cache of one rank."""

    dtype: str
    backend: str
    scales: dict[str, tuple[str, ...]]
    """The checkpoint names of attention layers, and the scales each has: `q`, `k`, `v`."""
    refusals: tuple[str, ...]
    """Why scales cannot be changed or measured."""

    @property
    def is_fp8(self) -> bool:
        """Whether the cache is FP8, with or without scales."""
        return bool(self.scales) or "fp8" in self.dtype

    @classmethod
    def of(cls, cache: KvCache) -> "KvLayout":
        """Describe `cache`."""
        return cls(
            dtype=cache.dtype,
            backend=cache.backend,
            scales={layer.name: tuple(scale.kind for scale in layer.scales) for layer in cache.layers},
            refusals=tuple(str(refusal) for refusal in (*cache.refusals, *cache.prefill_refusals)),
        )


class EngineLayout(BaseModel, frozen=True):
    """What one engine rank holds, and why it may be refused."""

    engine: str
    versions: dict[str, str]
    """Relevant packages and their versions."""
    device: str
    slots: tuple[SlotLayout, ...]
    aliases: dict[str, str]
    """Checkpoint names that share another name's slot."""
    unneeded: tuple[str, ...] = ()
    """Checkpoint names that a source may send but no slot takes; see `Inventory.unneeded`."""
    stacked: tuple[Stacked, ...] = ()
    """Tensors that hold the weights of all experts of a layer, which a source may send instead of single experts."""
    container: Container = Container.FP8
    """Of checkpoints from which the engine boots."""
    written_as: dict[str, tuple[str, ...]] = {}
    """Names under which a weight with block scales is written; see `Inventory.written_as`."""
    refusals: tuple[str, ...]
    adapters: dict[str, LoraAdapter] = {}
    """LoRA adapters that the engine has loaded, by name. Their slots are not among `slots`."""
    kv: KvLayout | None = None
    """None if the engine has no KV cache that fp8refit knows."""
    rounds_once: bool = False
    """Whether norms and rotary embeddings compute in float32 and round once."""
    is_proved: bool | None = None
    """Whether the engine's own loader put random values where the slots say; None if that was not looked at."""

    @property
    def verdict(self) -> str:
        """Whether the engine can be refitted, in a line."""
        if self.refusals:
            return f"can be refitted: no, for {len(by_cause(self.refusals))} cause(s)"
        num_fp8 = sum(slot.format is not None for slot in self.slots)
        return f"can be refitted: yes; {len(self.slots)} slots, {num_fp8} of them FP8"

    @classmethod
    def of(cls, inventory: Inventory, *, engine: str, versions: dict[str, str], device: str) -> "EngineLayout":
        """Describe `inventory`."""
        slots = [slot for slot in inventory.slots if not (slot.is_optional or slot.name.startswith(LORA))]
        firsts = {slot.group: slot.name if slot.group is not None else "" for slot in reversed(slots)}
        return cls(
            engine=engine,
            versions=versions,
            device=device,
            slots=tuple(SlotLayout.of(slot, firsts[slot.group]) for slot in slots),
            aliases={name: slot for name, slot in inventory.aliases.items() if not is_kv_scale(name)},
            unneeded=tuple(name for name in inventory.unneeded if not is_kv_scale(name)),
            stacked=inventory.stacked,
            container=inventory.container,
            written_as=dict(inventory.written_as),
            adapters=dict(inventory.adapters),
            kv=None if inventory.kv is None else KvLayout.of(inventory.kv),
            refusals=tuple(str(refusal) for refusal in inventory.refusals),
            rounds_once=inventory.rounds_once,
        )

    @classmethod
    def merge(cls, ranks: Sequence["EngineLayout"]) -> "EngineLayout":
        """Combine the layouts of all ranks. Slices are those of the first rank that holds the tensor."""
        slots: dict[str, list[SlotLayout]] = {}
        for rank in ranks:
            held: dict[str, list[SlotLayout]] = {}
            for slot in rank.slots:
                held.setdefault(slot.name, []).append(slot)
            slots |= {name: mine for name, mine in held.items() if name not in slots}
        stacked: dict[str, Stacked] = {}
        for stack in (stack for rank in ranks for stack in rank.stacked):
            known = stacked.get(stack.name, stack)
            stacked[stack.name] = replace(stack, parts={**stack.parts, **known.parts})
        written_as: dict[str, tuple[str, ...]] = {}
        for name, written in (item for rank in ranks for item in rank.written_as.items()):
            written_as[name] = written if written_as.get(name, written) == written else ()
        adapters: dict[str, LoraAdapter] = {}
        for name, adapter in (item for rank in ranks for item in rank.adapters.items()):
            first = adapters.get(name, adapter)
            adapters[name] = replace(
                first,
                shapes={**first.shapes, **adapter.shapes},
                scales={**first.scales, **adapter.scales},
                dtype=first.dtype or adapter.dtype,
                refusal=first.refusal or adapter.refusal,
            )
        for name in [name for name in adapters if any(name not in rank.adapters for rank in ranks)]:
            adapters[name] = LoraAdapter(refusal="is not loaded on every rank; add it to all (add_lora)")
        proved = [rank.is_proved for rank in ranks]
        return ranks[0].model_copy(
            update={
                "written_as": written_as,
                "stacked": tuple(stacked.values()),
                "adapters": adapters,
                "slots": tuple(slot for held in slots.values() for slot in held),
                "unneeded": tuple(dict.fromkeys(name for rank in ranks for name in rank.unneeded if name not in slots)),
                "aliases": {name: slot for rank in ranks for name, slot in rank.aliases.items()},
                "refusals": tuple(dict.fromkeys(refusal for rank in ranks for refusal in rank.refusals)),
                "is_proved": None if None in proved else all(proved),
            }
        )
