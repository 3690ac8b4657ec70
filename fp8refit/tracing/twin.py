"""Watches a model's own loader fill its twin: the same model, built again on the meta device.

The loader gets meta tensors with a checkpoint's names and shapes, and shows which box of each goes where.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fp8refit.live.copies import is_uniform, values_of
from fp8refit.live.formats import PER_ROW, PER_TENSOR, BlockFormat, Container
from fp8refit.live.names import without_numbers
from fp8refit.live.slots import FP8_DTYPE, SCALE_SUFFIX, Refresh, Refusal, Stacked, TensorMeta
from fp8refit.tracing.records import Copy, Objection, Traced
from fp8refit.tracing.scale_names import ScaleNames
from fp8refit.tracing.similar_layers import trace_similar
from fp8refit.tracing.stored import own_name, own_tensors
from fp8refit.tracing.trace import Load, storage_of, trace_once

_BEFORE_LAYER = re.compile(r"\.\d+\.")


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
    """Other names that a loader may accept, such as without a base model's prefix, and the checkpoint's names for them."""
    buffers: frozenset[str] = frozenset()
    """Checkpoint names of buffers."""
    beside: tuple[str, ...] = ()
    """Patterns of what published checkpoints hold beside these, such as `mtp.*`. In a twin: those that its loader skips."""


class EmptyOnMeta(TorchFunctionMode):
    """While active, tensors created without values get no memory, except for some.

    Others keep theirs: some models read values that they computed while being built.

    Args:
        real: The numbers of those that get memory, counted from 0.
        device: Where they get it.
    """

    def __init__(self, real: Collection[int] = (), device: torch.device | None = None) -> None:
        super().__init__()
        self._real, self._device = real, device
        self.made: list[Tensor] = []
        """What was created."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Create empty tensors on the meta device."""
        kwargs = kwargs or {}
        if func not in (torch.empty, torch.empty_strided):
            return func(*args, **kwargs)
        device = self._device if len(self.made) in self._real else "meta"
        self.made.append(func(*args, **{**kwargs, "device": device, "pin_memory": False}))
        return self.made[-1]

    def numbers_of(self, named: Mapping[str, Tensor]) -> dict[str, int]:
        """Return which of the tensors created here is the storage of each of `named`."""
        numbers = {storage_of(tensor): number for number, tensor in enumerate(self.made)}
        return {name: numbers[storage_of(t)] for name, t in named.items() if storage_of(t) in numbers}


Build: TypeAlias = Callable[[EmptyOnMeta], AbstractContextManager[Any]]
"""Builds a model while a mode is active. Its loader can be run within the context."""


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
    """Initial values of tensors that the model's loader never writes: persistent buffers, and parameters that are one number
    throughout."""
    values: Mapping[str, Tensor] = field(default_factory=dict)
    """What the twin and its helpers hold, by name, if it has values without a checkpoint."""
    container: Container = Container.FP8
    """Of its checkpoints, if they hold block scales."""
    written_as: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names under which a weight with block scales is written; see `Inventory.written_as`."""
    is_alone: bool = True
    """Whether this is the only rank, so that no other rank reads what it leaves out."""
    build: Build | None = None
    """Builds it again; None if that is impossible, and what its loader does cannot be proved."""
    made_by: Mapping[str, int] = field(default_factory=dict)
    """Names, and the numbers that `EmptyOnMeta` gave their storages."""
    replaced: frozenset[str] = frozenset()
    """Names that have another storage after loading."""
    proved: dict[object, tuple[Refusal, ...]] = field(default_factory=dict)
    """What was proved of it, and what came out."""

    def without(self, names: Collection[str]) -> "Twin":
        """The same without tensors that the live model has of another one."""
        firsts = {self.firsts[name] for name in names}
        rest = {name: first for name, first in self.firsts.items() if first not in firsts}
        traced = self.traced.without(firsts)
        unread = self.traced.taken - traced.taken
        sources = {name: meta for name, meta in self.naming.tensors.items() if name not in unread}
        return replace(
            self,
            naming=replace(self.naming, tensors=sources),
            traced=traced,
            tensors={name: self.tensors[name] for name in rest},
            firsts=rest,
            constants={name: value for name, value in self.constants.items() if name in rest},
        )


def trace_twin(
    model: Any,
    naming: Naming,
    load: Load | None = None,
    *,
    num_ranks: int = 1,
    stored: BlockFormat | None = None,
    container: Container = Container.FP8,
    build: Build | None = None,
    mode: EmptyOnMeta | None = None,
) -> Twin:
    """Run the loader of a model on the meta device.

    Args:
        model: The twin.
        naming: What its checkpoint holds.
        load: Its loader, if it is not `model.load_weights`.
        num_ranks: How many ranks share a checkpoint.
        stored: How checkpoints hold weights with block scales, if the model loads such.
        container: How these name and shape scales.
        build: Builds the twin again.
        mode: What was active while it was built.
    """
    named = dict(named_tensors(model))
    known: dict[int, str] = {}
    firsts = {name: known.setdefault(storage_of(tensor), name) for name, tensor in named.items()}
    load = load if load is not None else model.load_weights
    # Use the checkpoint's dtypes: transformers' own model is float32 on the meta device.
    naming = replace(naming, tensors=_in_bf16(naming.tensors))
    traced = trace_similar(load, named, naming.tensors)
    traced = replace(traced, objections=(*traced.objections, *_packed(model, firsts)))
    aliases = {**naming.aliases, **_taken_alike(load, named, naming, traced)}
    skipped = tuple(each for each in naming.beside if _skips(load, named, naming, each))
    naming = replace(naming, aliases=aliases, beside=skipped)
    written_as: dict[str, tuple[str, ...]] = {}
    if stored is not None:
        written_as = ScaleNames(
            load=load,
            named=named,
            sources=naming.tensors,
            aliases=naming.aliases,
            stored=stored,
            container=container,
        ).written_as(traced)
    loaded = dict(named_tensors(model))
    return Twin(
        naming=naming,
        traced=traced,
        tensors={name: TensorMeta.of(tensor) for name, tensor in named.items()},
        firsts=firsts,
        constants=dict(_constants(model, traced, firsts)),
        values=values_of(model),
        container=container,
        written_as=written_as,
        is_alone=num_ranks == 1,
        build=build,
        made_by=mode.numbers_of(named) if mode is not None else {},
        replaced=frozenset(n for n in named if n not in loaded or storage_of(loaded[n]) != storage_of(named[n])),
    )


def trace_as_named(model: Any, namings: Iterable[Naming], **options: Any) -> Twin | None:
    """Return `trace_twin` for the first naming of which the loader takes every name; if there is none, for the first one.

    Args:
        model: The twin.
        namings: What its checkpoints may hold and how they name it. If empty, the result is None.
        options: See `trace_twin`.
    """
    first = None
    for naming in namings:
        twin = trace_twin(model, naming, **options)
        if not any(objection.source and not objection.parameter for objection in twin.traced.objections):
            return twin
        first = first or twin
    return first


def format_stored(quantization: Any, model: nn.Module) -> dict[str, Any]:
    """How an engine's checkpoints hold block scales: options of `trace_twin`, from its quantization config and the layers of
    its twin. Empty if they hold none.
    """
    coded = [each for each in model.modules() if FP8_DTYPE in {own.dtype for own in each.parameters(recurse=False)}]
    sizes = (getattr(each, "weight_block_size", None) for each in (quantization, *coded))
    size = next((each for each in sizes if each is not None), None)
    scales = [
        (own, each._parameters.get(own_name(each, key).removesuffix(SCALE_SUFFIX)))
        for each in coded
        for key, own in each._parameters.items()
        if own is not None and own_name(each, key).endswith(SCALE_SUFFIX)
    ]
    if size is not None:
        stored = BlockFormat(block_size=(int(size[0]), int(size[1])))
    elif not scales:
        return {}
    else:
        are_of_rows = any(weight is not None and scale.ndim == weight.ndim for scale, weight in scales)
        stored = PER_ROW if are_of_rows else PER_TENSOR
    name = quantization.get_name().replace("_", "-")
    container = Container(name) if name in list(Container) else Container.FP8
    return {"stored": stored, "container": container}


def _packed(model: nn.Module, firsts: Mapping[str, str]) -> Iterator[Objection]:
    """Yield an objection for each parameter that lies beside another in one storage: a trace cannot tell them apart."""
    parameters = dict(named_tensors(model, ("_parameters",)))
    for name, tensor in parameters.items():
        first = parameters[firsts[name]]
        if (tensor.storage_offset(), tensor.numel()) != (first.storage_offset(), first.numel()):
            yield Objection(source="", parameter=firsts[name], reason=f"lies in one storage with `{name}`")


def _constants(model: nn.Module, traced: Traced, firsts: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    written = {each.parameter for found in (traced.copies, traced.computed, traced.objections) for each in found}
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            full_name = f"{prefix}.{own_name(module, name)}" if prefix else own_name(module, name)
            if tensor is None or tensor.is_meta or not tensor.is_floating_point() or firsts[full_name] in written:
                continue
            is_persistent = name in module._buffers and name not in module._non_persistent_buffers_set
            if is_persistent or (name in module._parameters and tensor.numel() and is_uniform(tensor)):
                yield full_name, tensor.detach()


def refreshes_of_constants(
    model: nn.Module, twin: Twin, kept: Callable[[nn.Module], Collection[str]]
) -> tuple[Refresh, ...]:
    """Return steps that restore buffers no checkpoint holds, since a dummy boot fills them with noise.

    Args:
        model: The live model.
        twin: Its twin.
        kept: Returns the attributes of a module that something else sets, such as scales of its KV cache.
    """
    others = {f"{prefix}.{key}" for prefix, module in model.named_modules() for key in kept(module)}
    live = {name: tensor for name, tensor in model.named_buffers() if name in twin.constants.keys() - others}
    refreshes = (refresh_of_constant(name, tensor, twin.constants[name]) for name, tensor in live.items())
    return tuple(replace(refresh, is_constant=True) for refresh in refreshes)


def _in_bf16(tensors: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    metas = {meta: replace(meta, dtype=torch.bfloat16) for meta in set(tensors.values())}
    return {name: metas[meta] for name, meta in tensors.items()}


def _taken_alike(load: Load, named: Mapping[str, Tensor], naming: Naming, traced: Traced) -> dict[str, str]:
    """Return the names in `naming.others` that the loader accepts and copies to the same places."""
    try:
        sources = {other: naming.tensors[name] for other, name in naming.others.items()}
        # Most loaders raise for all of these or skip them, so try one of each kind first.
        kinds = {without_numbers(other): other for other in reversed(sources)}
        if not trace_once(load, named, {other: sources[other] for other in kinds.values()}).copies:
            return {}
        others = trace_similar(load, named, sources, trace_once)
    except Exception:  # noqa: BLE001 - a loader may raise anything for names that it does not know
        return {}
    places = _copies_by_source(traced)
    found = _copies_by_source(others)
    return {other: name for other, name in naming.others.items() if other in found and found[other] == places.get(name)}


def _skips(load: Load, named: Mapping[str, Tensor], naming: Naming, pattern: str) -> bool:
    """Whether the loader leaves out tensors of these names, read and raised nothing: tried with one of each kind of a layer."""
    stem, asked = pattern.strip("*."), dict[str, TensorMeta]()
    for name in {without_numbers(name): name for name in naming.tensors}.values():
        part, meta = _BEFORE_LAYER.split(name, 1)[-1], naming.tensors[name]
        asked |= {f"{stem}.{part}": meta, f"{stem}.layers.0.{part}": meta}
    try:
        traced = trace_once(load, named, asked)
    except Exception:  # noqa: BLE001 - as above
        return False
    taken = traced.taken.union(each.source for each in traced.objections)
    return taken.isdisjoint(asked)


def _copies_by_source(traced: Traced) -> dict[str, set[Copy]]:
    found: dict[str, set[Copy]] = {}
    for copy in traced.copies:
        found.setdefault(copy.source, set()).add(copy._replace(source=""))
    return found


def refresh_of_constant(name: str, tensor: Tensor, value: Tensor) -> Refresh:
    """Return the step that gives a live tensor the value that it was built with."""
    run = partial(_bring_back, tensor, value)
    return Refresh(name=f"{name}: constant", run=run, written=(tensor,), restores=True)


@torch.inference_mode()
def _bring_back(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)


def named_tensors(model: nn.Module, kinds: Sequence[str] = ("_parameters", "_buffers")) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters under all of their names, then buffers. A buffer that is a view of a parameter counts as one."""
    modules = list(model.named_modules(remove_duplicate=False))
    for held in kinds:
        for prefix, module in modules:
            for name, tensor in own_tensors(module, (held,)):
                yield f"{prefix}.{name}" if prefix else name, tensor
