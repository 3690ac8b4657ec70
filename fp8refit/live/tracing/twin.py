"""Reads slots from a live model by watching the model's own loader fill its twin.

A twin is the same model built again on the meta device. Its loader gets meta tensors with a checkpoint's names and
shapes, and shows which box of each goes where. This module compares that with the live model. It refuses a parameter that
copies do not cover exactly once, or that the engine's kernels keep in another form.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fp8refit.live.names import is_not_a_weight
from fp8refit.live.parameters import live_tensors
from fp8refit.live.slots import (
    FP8_DTYPE,
    SOURCE_DTYPES,
    Inventory,
    PartlyRead,
    Refresh,
    Refusal,
    Slot,
    Stacked,
    TensorMeta,
    dtype_name,
)
from fp8refit.live.tracing.alike import trace_alike
from fp8refit.live.tracing.boxes import Boxes, Range, fault_of_cover, pieces_of, written_by
from fp8refit.live.tracing.reads import partly_read, refusals_of
from fp8refit.live.tracing.rules import KernelRules, Why
from fp8refit.live.tracing.staged import Staged, fault_of_recipe
from fp8refit.live.tracing.trace import Base, Computed, Copy, Load, Objection, Traced, storage_of, trace_once

_SCALE_SUFFIX = "_scale_inv"
_TWO_HALVES = "w13_weight"
"""Gate and up projections of an expert layer, one above the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Naming:
    """What a checkpoint of a model holds, and what a state dict may call the same tensors."""

    tensors: Mapping[str, TensorMeta]
    """Checkpoint name to shape and dtype."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Second names of tensors, and their first ones."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names in a state dict, and the checkpoint's names for the same tensors."""
    stacked: tuple[Stacked, ...] = ()
    """Tensors in a state dict that hold several of a checkpoint's."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Names a loader may also accept, such as without a base model's prefix, and the names of the same tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """What remains of a twin after its loader ran."""

    naming: Naming
    traced: Traced
    tensors: Mapping[str, TensorMeta]
    """Parameters and buffers by all of their names."""
    firsts: Mapping[str, str]
    """Each of these names, and the first name with the same storage."""
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    """Values, once the model is built, of persistent buffers and of parameters that are one number throughout, if its loader
    writes none of their elements."""
    is_alone: bool = True
    """Whether this is the only rank, so that no other reads what it does not."""


class EmptyOnMeta(TorchFunctionMode):
    """While active, tensors created without values get no memory.

    Others keep theirs: some models read values that they computed while being built.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Create empty tensors on the meta device."""
        kwargs = kwargs or {}
        if func in (torch.empty, torch.empty_strided):
            kwargs = {**kwargs, "device": "meta", "pin_memory": False}
        return func(*args, **kwargs)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python from collecting garbage: a trace makes many objects and no garbage, and an engine has many more."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def trace_twin(model: Any, naming: Naming, load: Load | None = None, *, num_ranks: int = 1) -> Twin:
    """Run the loader of a model on the meta device.

    Args:
        model: The twin.
        naming: What its checkpoint holds.
        load: Its loader, if it is not `model.load_weights`.
        num_ranks: How many ranks share a checkpoint.
    """
    named = dict(_named_tensors(model))
    known: dict[int, str] = {}
    firsts = {name: known.setdefault(storage_of(tensor), name) for name, tensor in named.items()}
    load = load if load is not None else model.load_weights
    # Use the checkpoint's dtypes: transformers' own model is float32 on the meta device.
    naming = replace(naming, tensors=_in_bf16(naming.tensors))
    traced = trace_alike(load, named, naming.tensors)
    traced = replace(traced, objections=(*traced.objections, *_packed(model, firsts)))
    others = _taken_alike(load, named, naming, traced)
    return Twin(
        naming=replace(naming, aliases={**naming.aliases, **others}),
        traced=traced,
        tensors={name: TensorMeta.of(tensor) for name, tensor in named.items()},
        firsts=firsts,
        constants=dict(_constants(model, traced, firsts)),
        is_alone=num_ranks == 1,
    )


def trace_as_named(model: Any, namings: Iterable[Naming], *, num_ranks: int) -> Twin | None:
    """Return `trace_twin` of the first naming of which the model's loader takes every name, or else of the first one.

    Args:
        model: The twin.
        namings: What its checkpoints may hold, under which names. If empty, there is no trace.
        num_ranks: How many ranks share a checkpoint.
    """
    first = None
    for naming in namings:
        twin = trace_twin(model, naming, num_ranks=num_ranks)
        if not any(objection.source and not objection.parameter for objection in twin.traced.objections):
            return twin
        first = first or twin
    return first


def _packed(model: nn.Module, firsts: Mapping[str, str]) -> Iterator[Objection]:
    """Object to parameters that lie side by side in one storage: a trace does not tell them apart."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in parameters.items():
        first = parameters[firsts[name]]
        if (tensor.storage_offset(), tensor.numel()) != (first.storage_offset(), first.numel()):
            yield Objection(source="", parameter=firsts[name], reason=f"lies in one storage with `{name}`")


def _constants(model: nn.Module, traced: Traced, firsts: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    written = {each.parameter for found in (traced.copies, traced.computed, traced.objections) for each in found}
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            full_name = f"{prefix}.{name}" if prefix else name
            if tensor is None or tensor.is_meta or not tensor.is_floating_point() or firsts[full_name] in written:
                continue
            is_persistent = name in module._buffers and name not in module._non_persistent_buffers_set
            if is_persistent or (
                name in module._parameters and tensor.numel() and bool((tensor == tensor.flatten()[0]).all())
            ):
                yield full_name, tensor.detach()


def refreshes_of_constants(model: nn.Module, twin: Twin) -> tuple[Refresh, ...]:
    """Return steps that restore buffers no checkpoint holds, since a dummy boot fills them with noise.

    Args:
        model: The live model.
        twin: Its twin.
    """
    live = {name: tensor for name, tensor in model.named_buffers() if name in twin.constants}
    return tuple(
        Refresh(name=f"{name}: constant", run=partial(_bring_back, tensor, twin.constants[name]), written=(tensor,))
        for name, tensor in live.items()
    )


def _in_bf16(tensors: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    metas = {meta: replace(meta, dtype=torch.bfloat16) for meta in set(tensors.values())}
    return {name: metas[meta] for name, meta in tensors.items()}


def _taken_alike(load: Load, named: Mapping[str, Tensor], naming: Naming, traced: Traced) -> dict[str, str]:
    """Return the names in `naming.others` that the loader accepts and copies to the same places."""
    try:
        sources = {other: naming.tensors[name] for other, name in naming.others.items()}
        trace_once(load, named, dict([*sources.items()][:1]))  # most loaders fail at any of them, and at once
        others = trace_alike(load, named, sources, trace_once)
    except Exception:  # noqa: BLE001 - whatever a loader says of names that it does not know
        return {}
    places = _copies_by_source(traced)
    found = _copies_by_source(others)
    return {other: name for other, name in naming.others.items() if other in found and found[other] == places.get(name)}


def _copies_by_source(traced: Traced) -> dict[str, set[Copy]]:
    found: dict[str, set[Copy]] = {}
    for copy in traced.copies:
        found.setdefault(copy.source, set()).add(replace(copy, source=""))
    return found


@torch.inference_mode()
def _bring_back(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)


def read_inventory(model: nn.Module, rules: KernelRules, twin: Twin) -> Inventory:
    """Return everything that a refit of `model` writes, and everything it cannot write.

    Args:
        model: The live model.
        rules: What its engine's kernels do.
        twin: What the loader of its twin did.
    """
    reading = _Reading(model, rules, twin)
    for prefix, module in model.named_modules():
        reading.add(prefix, module)
    return reading.inventory()


class _Reading:
    def __init__(self, model: nn.Module, rules: KernelRules, twin: Twin) -> None:
        self._model, self._rules, self._twin = model, rules, twin
        self._copies: dict[str, list[Copy]] = {}
        for copy in twin.traced.copies:
            self._copies.setdefault(copy.parameter, []).append(copy)
        self._computed: dict[str, list[Computed]] = {}
        for computed in twin.traced.computed:
            self._computed.setdefault(computed.parameter, []).append(computed)
        self._reasons: dict[str, str] = {}
        for objection in twin.traced.objections:
            who = f"`{objection.source}` " if objection.source else ""
            self._reasons.setdefault(objection.parameter, f"{who}{objection.reason}")
        self._live = {
            self._twin_name(prefix, name): tensor.data
            for prefix, module in model.named_modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        filled = {*self._copies, *self._computed, *self._reasons}
        self._filled = {tensor.data_ptr() for name, tensor in self._live.items() if twin.firsts.get(name) in filled}
        """Addresses of live tensors that a checkpoint fills, under whatever name."""
        self._seen: dict[tuple[int, torch.Size], str] = {}
        self._slots: list[Slot] = []
        self._stacks: dict[str, Stacked] = {}
        self._padding: list[Tensor] = []
        self._refreshes: list[Refresh] = []
        self._refusals: list[Refusal] = []
        self._shared: dict[str, str] = {}
        self._has_block_fp8 = False
        self._faults: dict[object, str | None] = {}
        self._boxes: dict[object, list[list[Boxes]] | None] = {}
        """The boxes of all copies into a parameter, by how they fill it, as many are filled alike."""

    def add(self, prefix: str, module: nn.Module) -> None:
        """Read the tensors of `module`, without its children."""
        own = self._own_tensors(prefix, module)
        for name in [name for name in own if self._is_constant(prefix, name, own)]:
            self._add_constant(prefix, name, own.pop(name))
        why = self._rules.why_refused(module)
        if why is None and own:
            why = _why_not_stored(self._rules, prefix, module, own) or self._why_not_loaded(prefix, own)
        if why is not None:
            self._refuse(prefix, module, why)
            return
        for name, tensor in own.items():
            if not name.endswith(_SCALE_SUFFIX):
                self._add_tensor(prefix, module, name, tensor, own.get(name + _SCALE_SUFFIX))

    def inventory(self) -> Inventory:
        """Return what was read."""
        if not self._refusals and not self._has_block_fp8:
            reason, remedy = "holds no block-FP8 weight", self._rules.remedies.no_block_fp8
            self._refusals.append(Refusal(module=type(self._model).__name__, reason=reason, remedy=remedy))
        partly = partly_read(self._twin.traced, self._twin.naming.tensors)
        if self._refusals:
            self._tell_of_names(partly)
        elif self._twin.is_alone:
            self._refusals += refusals_of([partly])
        naming, held = self._twin.naming, {slot.name for slot in self._slots}
        stacked = tuple(found for stack in naming.stacked if (found := _held_of(stack, held)) is not None)
        stacked = (*stacked, *self._stacks.values())
        names = held.union(stack.name for stack in stacked)
        second = {name: first for name, first in naming.tied.items() if name not in held} | self._shared
        aliases = second | {name: first for name, first in naming.aliases.items() if name not in names}
        return Inventory(
            slots=tuple(self._slots),
            live=live_tensors(self._model),
            aliases={name: first for name, first in aliases.items() if first in names},
            stacked=stacked,
            padding=tuple(self._padding),
            refreshes=tuple(self._refreshes),
            refusals=tuple(self._refusals),
            partly_read={} if self._twin.is_alone else partly,
        )

    def _tell_of_names(self, partly: Mapping[str, PartlyRead]) -> None:
        """Report first which tensors the loader did not take, if there are weights that nothing fills."""
        none = "is left out by the model's loader" if self._twin.is_alone else ""
        reasons = {name: read.reason or none for name, read in partly.items() if not read.boxes}
        untaken = [(name, reason) for name, reason in reasons.items() if reason and not is_not_a_weight(name)]
        if untaken:
            name, reason = untaken[0]
            others = f", like {len(untaken) - 1} others" if len(untaken) > 1 else ""
            remedy = "The engine itself would not load such a checkpoint"
            self._refusals.insert(0, Refusal(module=name, reason=reason + others, remedy=remedy))

    def _own_tensors(self, prefix: str, module: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of `module`, and its buffers that the loader writes."""
        own = {name: t.data for name, t in module._parameters.items() if t is not None}
        written = self._copies.keys() | self._computed.keys() | self._reasons.keys()
        loaded = ((name, t) for name, t in module._buffers.items() if self._twin_name(prefix, name) in written)
        own |= {name: tensor for name, tensor in loaded if tensor is not None}
        kept = self._rules.kept(module)
        found = {}
        for name, tensor in own.items():
            full_name = self._twin_name(prefix, name)
            first = self._seen.setdefault((tensor.data_ptr(), tensor.shape), full_name) if tensor.numel() else full_name
            if first != full_name:
                self._share(full_name, first)
            elif name not in kept:
                found[name] = tensor
        return found

    def _is_constant(self, prefix: str, name: str, own: Mapping[str, Tensor]) -> bool:
        """Whether a parameter is one number in a new model, and nothing ever fills it: norms that only some layers use."""
        value, tensor = self._twin.constants.get(self._twin_name(prefix, name)), own[name]
        if value is None or name.endswith(_SCALE_SUFFIX) or name + _SCALE_SUFFIX in own:
            return False
        return (value.shape, value.dtype) == (tensor.shape, tensor.dtype) and tensor.data_ptr() not in self._filled

    def _add_constant(self, prefix: str, name: str, tensor: Tensor) -> None:
        """Record that a parameter keeps its first value: noise of a dummy boot, and sleep, take it away."""
        value = self._twin.constants[self._twin_name(prefix, name)]
        run = partial(_bring_back, tensor, value)
        self._refreshes.append(Refresh(name=f"{prefix}.{name}: constant", run=run, written=(tensor,)))

    def _share(self, name: str, first: str) -> None:
        """Make the names of what is loaded into a tensor aliases, if it shares another one's storage."""
        mine, theirs = ({(c.into, c.runs): c for c in self._copies.get(n, ())} for n in (name, first))
        self._shared |= {
            copy.source: theirs[place].source
            for place, copy in mine.items()
            if place in theirs and theirs[place].source != copy.source
        }

    @staticmethod
    def _twin_name(prefix: str, name: str) -> str:
        """The twin's name of a live tensor, without LoRA wrappers around layers."""
        parts = [part for part in prefix.split(".") if part not in ("", "base_layer")]
        return ".".join([*parts, name])

    def _refuse(self, prefix: str, module: nn.Module, why: tuple[str, str]) -> None:
        self._refusals.append(Refusal(module=prefix or type(module).__name__, reason=why[0], remedy=why[1]))

    def _why_not_loaded(self, prefix: str, own: Mapping[str, Tensor]) -> Why:
        """Say why the live tensors are not those of the twin, each filled exactly once; None if they are."""
        for name, tensor in own.items():
            twin = self._twin.tensors.get(self._twin_name(prefix, name))
            is_scale = name.endswith(_SCALE_SUFFIX)
            if is_scale and (twin is None or twin.dtype is tensor.dtype):
                continue  # scales follow from the values of their weight
            if twin is None:
                return f"holds `{name}`, which is not there when the model is built", "fp8refit does not know it yet"
            is_quantized_later = name + _SCALE_SUFFIX in own and twin.dtype in SOURCE_DTYPES
            if twin.shape != tuple(tensor.shape) or not (twin.dtype is tensor.dtype or is_quantized_later):
                found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
                return f"holds `{name}` as {found}, and was built with {twin}", "fp8refit does not know its kernel yet"
            fault = self._fault_of(self._twin_name(prefix, name), twin)
            if fault is not None:
                return f"`{name}`: {fault}", "fp8refit does not know what fills it yet"
        return None

    def _fault_of(self, name: str, twin: TensorMeta) -> str | None:
        """Say why a tensor of the twin is not filled exactly once by copies or repeatable computations; None if it is."""
        first = self._twin.firsts[name]
        if first in self._reasons:
            return self._reasons[first]
        copies, computed = self._copies.get(first, []), self._computed.get(first, [])
        itself = Base(name=first, is_parameter=True)
        of_itself = [each for each in computed if itself in each.recipe.bases()]
        rounds = [[*copies, *(each.into for each in computed if each not in of_itself)]]
        if of_itself:
            rounds.append([each.into for each in of_itself])
        faults = (self._fault_of_writes(writes, twin.shape) for writes in rounds)
        return next((fault for fault in faults if fault is not None), None)

    def _fault_of_writes(self, writes: Sequence[Copy], shape: tuple[int, ...]) -> str | None:
        key = shape, tuple((write.into, write.runs) for write in writes)
        if key not in self._faults:
            boxes = [written_by(write, shape) for write in writes]
            self._faults[key] = fault_of_cover([box for found in boxes for box in found or ()], shape)
        return self._faults[key]

    def _pieces(self, prefix: str, name: str) -> list[tuple[Copy, Boxes]] | None:
        """Return the boxes that fill a tensor; None if it has none or is computed."""
        full_name = self._twin_name(prefix, name)
        first, shape = self._twin.firsts[full_name], self._twin.tensors[full_name].shape
        if first in self._computed:
            return None
        copies = [copy for copy in self._copies[first] if copy.source]
        full_shapes = [self._twin.naming.tensors[copy.source].shape for copy in copies]
        places = ((copy.into, copy.start, copy.runs) for copy in copies)
        key = shape, tuple(zip(places, full_shapes, strict=True))
        if key not in self._boxes:
            found = [pieces_of(copy, shape, full) for copy, full in zip(copies, full_shapes, strict=True)]
            boxes = [pieces for pieces in found if pieces is not None]
            self._boxes[key] = boxes if len(boxes) == len(found) else None
        known = self._boxes[key]
        if known is None:
            return None
        return [(copy, piece) for copy, pieces in zip(copies, known, strict=True) for piece in pieces]

    def _add_tensor(self, prefix: str, module: nn.Module, name: str, weight: Tensor, scale: Tensor | None) -> None:
        pieces = self._pieces(prefix, name)
        self._has_block_fp8 |= scale is not None
        common: dict[str, Any] = {}
        starts: dict[int, int] | None = None
        kernel = self._rules.kernel_of(module) if scale is not None else None
        if scale is not None and kernel is not None:
            block_size = self._rules.block_size_of(module)
            common = {"scale_format": kernel.scale_format, "block_size": block_size}
            if pieces is not None and name == _TWO_HALVES and self._rules.swaps_halves(module):
                pieces = _with_halves_swapped(pieces, weight.shape[1])
            if pieces is not None and all(_are_matrices(boxes, weight.ndim) for _, boxes in pieces):
                starts = _block_rows([boxes for _, boxes in pieces], weight, scale, block_size)
        if scale is not None and self._is_padded(prefix, name):
            reason = f"`{name}` is padded when it is loaded, and the scales of the padding are unknown"
            self._refuse(prefix, module, (reason, "Boot with sizes that fit the engine's"))
            return
        is_mixed = pieces is not None and scale is None and any(boxes.is_transposed for _, boxes in pieces)
        if pieces is None or is_mixed or (scale is not None and starts is None):
            self._add_staged(prefix, module, name, weight, scale, common)
            return
        if kernel is not None:
            common["kernel"] = kernel.name
        for copy, boxes in pieces:
            matrices = _matrices(boxes) if scale is not None else iter((boxes,))
            for matrix in matrices:
                if scale is not None and starts is not None:
                    common["scale"] = _blocks_of(scale, matrix, starts, common["block_size"])
                self._slots.append(self._slot(copy.source, matrix, weight, prefix, **common))
        self._add_padding(prefix, name, weight)

    def _is_padded(self, prefix: str, name: str) -> bool:
        copies = self._copies.get(self._twin.firsts[self._twin_name(prefix, name)], ())
        return any(not copy.source for copy in copies)

    def _add_padding(self, prefix: str, name: str, tensor: Tensor) -> None:
        """Record what a loader sets to zero."""
        full_name = self._twin_name(prefix, name)
        for copy in self._copies[self._twin.firsts[full_name]]:
            if not copy.source:
                zeros = written_by(copy, self._twin.tensors[full_name].shape)
                self._padding += (_narrow(tensor, box) for box in zeros or ())

    def _add_staged(
        self, prefix: str, module: nn.Module, name: str, weight: Tensor, scale: Tensor | None, common: dict[str, Any]
    ) -> None:
        """Keep the sources of a tensor that is not a plain copy."""
        first = self._twin.firsts[self._twin_name(prefix, name)]
        computed = self._computed.get(first, [])
        faults = (fault_of_recipe(each, weight.dtype, weight.numel()) for each in computed)
        fault = next((fault for fault in faults if fault is not None), None)
        bases = {base for each in computed for base in each.recipe.bases() if base.is_parameter and base.name != first}
        others = {base: self._live[base.name] for base in bases if base.name in self._live}
        if others.keys() != bases or any(other.dtype not in SOURCE_DTYPES for other in others.values()):
            fault = "is computed from weights that the engine keeps in another form"
        if not weight.is_contiguous() or (scale is not None and weight.ndim != 2):
            fault = "is filled in an order that fp8refit cannot reproduce in its storage"
        if fault is not None:
            self._refuse(prefix, module, (f"`{name}` {fault}", "Leave this layer in BF16"))
            return
        copies = self._copies.get(first, [])
        staged = Staged(weight=weight, copies=copies, computed=computed, others=others, scale=scale, slot=common)
        self._slots += staged.slots(prefix, self._twin.naming.tensors)
        written = (weight,) if scale is None else (weight, scale)
        self._refreshes.append(Refresh(name=f"{prefix}.{name}", run=staged.refresh, written=written))

    def _slot(self, source: str, boxes: Boxes, tensor: Tensor, module: str, **others: Any) -> Slot:
        """Return the slot of a box of a live tensor. Matrices of a stack become separate slots, under names of ours."""
        full_shape, is_transposed = self._twin.naming.tensors[source].shape, boxes.is_transposed
        if is_transposed:
            boxes, full_shape = boxes.transposed(), (full_shape[0], full_shape[2], full_shape[1])
        read, dims = boxes.read, boxes.dims
        weight = _narrow(tensor, boxes.into)
        for dim in reversed(range(weight.ndim)):
            if dim not in dims:
                weight = weight.squeeze(dim)
        if "scale" in others and len(full_shape) == 3:
            index, full_stack = read[0][0], full_shape
            name = f"{source}[{index}]"
            known = self._stacks.get(source)
            parts = {**(known.parts if known is not None else {}), name: (index, 0)}
            shape = full_stack[0], full_stack[1], full_stack[2]
            self._stacks[source] = Stacked(name=source, shape=shape, parts=parts, is_transposed=is_transposed)
            source, full_shape, read, dims = name, full_shape[1:], read[1:], dims[1:]
        for place, along in enumerate(dims):
            if along is None:
                weight = weight.unsqueeze(place)
        starts = tuple(start for start, _ in read)
        offset = starts if any(starts) else ()
        return Slot(name=source, full_shape=full_shape, weight=weight, offset=offset, module=module, **others)


def _why_not_stored(rules: KernelRules, prefix: str, module: nn.Module, own: Mapping[str, Tensor]) -> Why:
    """Say why the live tensors of a module cannot be written as they are stored."""
    if hasattr(module, "base_layer"):
        return f"holds {', '.join(f'`{name}`' for name in own)} around a layer, for LoRA", "Boot without enable_lora"
    if "w13_weight" in own and "base_layer" in prefix.split("."):
        return "is a layer of experts inside a LoRA wrapper, which was never tested", "Boot without enable_lora"
    for name, tensor in own.items():
        if tensor.numel() == 0:
            return f"its kernel removed `{name}`", "Boot with a kernel that keeps weights as loaded"
    scaled = [name for name in own if name + _SCALE_SUFFIX in own]
    odd = [name for name, tensor in own.items() if not _is_known(name, tensor, scaled)]
    if odd:
        held = ", ".join(f"{name} ({dtype_name(own[name].dtype)})" for name in odd)
        method = type(getattr(module, "quant_method", None)).__name__
        return f"holds {held} under {method}, which is not block FP8", rules.remedies.other_quantization
    if not scaled:
        return None
    kernel = rules.kernel_of(module)
    if not kernel.is_row_major:
        held = "experts" if _TWO_HALVES in own else "weights"
        return f"its kernel {kernel.name} repacks {held}, or is not known to leave them as loaded", kernel.remedy
    for name in scaled:
        why = _why_not_row_major(name, own[name], own[name + _SCALE_SUFFIX], rules.block_size_of(module))
        if why is not None:
            return why, kernel.remedy
    return None


def _is_known(name: str, tensor: Tensor, scaled: Sequence[str]) -> bool:
    """Whether a live tensor is part of a block-FP8 weight, or has a dtype that a source may have."""
    if name in scaled:
        return tensor.dtype is FP8_DTYPE
    if name.endswith(_SCALE_SUFFIX):
        return name.removesuffix(_SCALE_SUFFIX) in scaled
    return tensor.dtype in SOURCE_DTYPES and not name.endswith("weight_scale")


def _why_not_row_major(name: str, weight: Tensor, scale: Tensor, block_size: tuple[int, int]) -> str | None:
    """Say why a weight and its scales are not stored as in a checkpoint."""
    if weight.ndim not in (2, 3) or not weight.is_contiguous():
        return f"its `{name}` is not a row-major float8_e4m3fn matrix"
    *experts, rows, columns = weight.shape
    halves = 2 if name == _TWO_HALVES and rows // 2 % block_size[0] else 1
    expected = [*experts, halves * -(-rows // halves // block_size[0]), -(-columns // block_size[1])]
    if scale.dtype is not torch.float32 or list(scale.shape) != expected or not scale.is_contiguous():
        found = f"{dtype_name(scale.dtype)} {list(scale.shape)}"
        return f"its `{name}{_SCALE_SUFFIX}` is {found}, not row-major float32 {expected}"
    return None


def _are_matrices(boxes: Boxes, ndim: int) -> bool:
    """Whether it is a box of a matrix, or of a stack of matrices, with rows as rows and columns as columns."""
    if len(boxes.dims) < 2:
        return False
    *stack, row, column = boxes.dims
    is_stack = stack in ([], [None]) or (ndim == 3 and stack == [0])
    if boxes.is_transposed:
        row, column = column, row
    return is_stack and row in (None, ndim - 2) and column in (None, ndim - 1)


def _matrices(boxes: Boxes) -> Iterator[Boxes]:
    """Split a box of several experts' matrices into one box per expert."""
    place = boxes.dims[0]
    if len(boxes.read) < 3 or place is None:
        yield boxes
        return
    (first, _), (first_read, count) = boxes.into[place], boxes.read[0]
    for index in range(count):
        into, read = list(boxes.into), list(boxes.read)
        into[place], read[0] = (first + index, 1), (first_read + index, 1)
        yield Boxes(into=tuple(into), read=tuple(read), dims=(None, *boxes.dims[1:]))


def _with_halves_swapped(pieces: Sequence[tuple[Copy, Boxes]], rows: int) -> list[tuple[Copy, Boxes]] | None:
    """Swap the upper and lower halves of a tensor's rows; None if a piece spans both."""
    found = []
    for copy, boxes in pieces:
        into = list(boxes.into)
        start, count = into[1]
        if start // (rows // 2) != (start + count - 1) // (rows // 2):
            return None
        into[1] = ((start + rows // 2) % rows, count)
        found.append((copy, replace(boxes, into=tuple(into))))
    return found


def _block_rows(
    pieces: Sequence[Boxes], weight: Tensor, scale: Tensor, block_size: tuple[int, int]
) -> dict[int, int] | None:
    """Map the first row of each piece to its first row of blocks; None if a piece does not start and end on block
    borders.

    The halves of `w13_weight` have separate blocks, whatever their number of rows.
    """
    rows, columns = weight.shape[-2:]
    block_n, block_k = block_size
    parts = {boxes.into[-2] for boxes in pieces}
    if not all(_is_on_grid(boxes.into[-1], block_k, columns) for boxes in pieces):
        return None
    if scale.shape[-2] != -(-rows // block_n):
        is_half = all(start % (rows // 2) == 0 and size == rows // 2 for start, size in parts)
        return {start: start // (rows // 2) * (scale.shape[-2] // 2) for start, _ in parts} if is_half else None
    return (
        {start: start // block_n for start, _ in parts} if all(_is_on_grid(p, block_n, rows) for p in parts) else None
    )


def _is_on_grid(part: Range, block: int, full: int) -> bool:
    start, size = part
    return start % block == 0 and (size % block == 0 or start + size == full)


def _blocks_of(scale: Tensor, matrix: Boxes, starts: Mapping[int, int], block_size: tuple[int, int]) -> Tensor:
    """Return the scales (block rows, block columns) of one matrix or a part of it."""
    *experts, (row, rows), (column, columns) = matrix.into
    blocks = (starts[row], -(-rows // block_size[0])), (column // block_size[1], -(-columns // block_size[1]))
    scale = _narrow(scale, (*experts, *blocks))
    return scale[0] if experts else scale


def _held_of(stack: Stacked, held: frozenset[str] | set[str]) -> Stacked | None:
    """Return this rank's part of a stack."""
    parts = {name: place for name, place in stack.parts.items() if name in held}
    return replace(stack, parts=parts) if parts else None


def _narrow(tensor: Tensor, box: Sequence[Range]) -> Tensor:
    for dim, (start, length) in enumerate(box):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters under all of their names, then buffers. A buffer that is a view of a parameter counts as one."""
    modules = list(model.named_modules(remove_duplicate=False))
    for held in ("_parameters", "_buffers"):
        for prefix, module in modules:
            for name, tensor in getattr(module, held).items():
                if tensor is not None:
                    yield f"{prefix}.{name}" if prefix else name, tensor.data
