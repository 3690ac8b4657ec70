"""LoRA adapters that an engine has loaded, as slots of its inventory.

A matrix is in two places: where the kernels read it, stacked with those of other adapters, and in host memory, from which the
engine fills a slot again for an adapter that has lost its own. How one becomes the other is traced, as loaders are: it is what
the engine's own code does when it fills a slot.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8refit.config import LORA
from fp8refit.live.names import strip_wrappers
from fp8refit.live.slots import LoraAdapter, Slot, dtype_name
from fp8refit.tracing.boxes import pieces_of
from fp8refit.tracing.stored import box_of
from fp8refit.tracing.trace import Trace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """An adapter that an engine has loaded."""

    name: str
    lora: Any
    """What the engine calls it."""
    index: int | None
    """Its slot, if it has one."""
    refusal: str = ""
    """Why it cannot be refitted, and what to do; empty if nothing is known against it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrices:
    """The matrices of an adapter, and how they get into its slot."""

    held: list[tuple[str, Tensor]]
    """Each one, whole, in host memory, by its name for PEFT. One that is there several times is listed as often. Zeros, which
    stand there for modules of which it has none, have no name."""
    stacked: Mapping[str, Tensor]
    """What the kernels read, for all adapters, by the name of a module and what else tells them apart, after a blank."""
    fill: Callable[[], object]
    """The engine's own way to copy them there."""
    scales: Mapping[str, float | None]
    """See `LoraAdapter.scales`; None where that is not known."""
    factor: float = 1.0
    """See `LoraAdapter.factor`."""


class AdapterMemory(Protocol):
    """Where an engine has its adapters."""

    def loaded(self) -> list[Loaded]:
        """All of which it is known how they were loaded."""
        ...

    def seated(self) -> list[Any]:
        """The engine's name for the adapter in each slot; None for an empty one."""
        ...

    def matrices_of(self, adapter: Loaded) -> Matrices:
        """The matrices of an adapter that has a slot."""
        ...

    def activate(self) -> None:
        """Give free slots to adapters that have none."""
        ...

    def deactivate(self) -> None:
        """Take its slot from every adapter. The engine fills one again, from host memory, before a request with the adapter."""
        ...

    def keep(self, lora: Any) -> None:
        """Let what host memory holds of an adapter count from now on, not its files, or anything made of what it held."""
        ...


@dataclass(kw_only=True, slots=True)
class Loras:
    """What was read of an engine's adapters."""

    slots: list[Slot] = field(default_factory=list)
    adapters: dict[str, LoraAdapter] = field(default_factory=dict)
    seated: list[Any] = field(default_factory=list)
    """See `AdapterMemory`."""
    copies: list[tuple[str, Tensor, Tensor, Any]] = field(default_factory=list)
    """The name of each slot, what it holds, the same in host memory, and the engine's adapter of which that is a part."""
    are_stale: bool = False
    """Whether adapters have moved since, and nothing else has."""

    @classmethod
    def of(cls, memory: AdapterMemory) -> "Loras":
        """List the adapters of a rank, and where their matrices are."""
        found, loaded = cls(seated=memory.seated()), memory.loaded()
        same = Counter(adapter.name for adapter in loaded)
        for adapter in loaded:
            why = adapter.refusal
            if strip_wrappers(f"{LORA}{adapter.name}.") != f"{LORA}{adapter.name}.":
                why = "has a name that fp8refit would take for that of a wrapper; load it under another"
            elif same[adapter.name] > 1:
                why = "is loaded under several ids; remove all but one (remove_lora)"
            elif adapter.index is None:
                why = (
                    "is loaded, but has no slot now: refit the weights first if they slept, or send a request with it, "
                    "or add it again (add_lora)"
                )
            elif not why:
                try:
                    why = found._add(adapter, memory.matrices_of(adapter))
                except Exception as error:
                    logger.debug("adapter %s cannot be read", adapter.name, exc_info=True)
                    why = f"cannot be read ({error!r}); load another, and merge this one into the weights"
            if why:
                found.adapters[adapter.name] = LoraAdapter(refusal=why)
        return found

    def _add(self, adapter: Loaded, matrices: Matrices) -> str:
        """Add an adapter, and the slots that the engine fills with copies of its matrices; or say why that cannot be."""
        held, stacked = matrices.held, matrices.stacked
        trace = Trace(stacked)  # which objects to the zeros that come first
        for place, (key, matrix) in enumerate(held):
            trace.note(str(place) if key else "", matrix)
        with torch.no_grad(), trace:
            matrices.fill()
        pieces = {
            copy: pieces_of(copy, tuple(stacked[copy.parameter].shape), tuple(held[int(copy.source)][1].shape))
            for copy in trace.copies
            if copy.source
        }
        known = {key: scale for key, scale in matrices.scales.items() if scale is not None}
        copied = {int(copy.source) for copy, boxes in pieces.items() if boxes is not None}
        odd = {key for place, (key, _) in enumerate(held) if key and place not in copied}
        odd |= {held[int(copy.source)][0] for copy, boxes in pieces.items() if boxes is None}
        odd |= {
            held[int(base.name)][0] for each in trace.computed for base in each.recipe.bases() if base.name.isdigit()
        }
        if odd := odd | (matrices.scales.keys() - known.keys()):
            return f"is held otherwise than in rows and columns, such as {min(odd)}; load one without these matrices"
        dtype = ""
        for copy, boxes in pieces.items():
            for box in boxes or ():
                key, full = held[int(copy.source)]
                here, name = box_of(full, box.read, range(full.ndim)), f"{LORA}{adapter.name}.{key}"
                stack = stacked[copy.parameter]
                weight = box_of(stack, box.into, range(stack.ndim)).view(here.shape)
                offset = tuple(start for start, _ in box.read)
                module, dtype = copy.parameter.split()[0], dtype_name(weight.dtype)
                self.slots.append(
                    Slot(name=name, full_shape=tuple(full.shape), weight=weight, offset=offset, module=module)
                )
                self.copies.append((name, weight, here, adapter.lora))
        self.adapters[adapter.name] = LoraAdapter(
            shapes={key: tuple(matrix.shape) for key, matrix in held if key},
            scales=known,
            factor=matrices.factor,
            dtype=dtype,
        )
        return ""

    @torch.inference_mode()
    def write_copies(self, memory: AdapterMemory, written: Collection[str]) -> None:
        """Make what host memory holds of the slots with these names equal to them."""
        for name, weight, copy, lora in self.copies:
            if name in written:
                copy.copy_(weight)
                memory.keep(lora)


@contextmanager
def tried(what: str) -> Iterator[None]:
    """Leave what an engine cannot do undone, such as giving a slot to an adapter that does not fit: others can be refitted."""
    try:
        yield
    except Exception:
        logger.debug("%s has got no slot", what, exc_info=True)
