"""Reads slots from a live model by comparing it with its twin.

It refuses a parameter that copies do not cover exactly once, or that the engine's kernels keep in another form.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8refit.kernels.placement import bias_in_order
from fp8refit.live.formats import GLOBAL_SUFFIX, BlockFormat
from fp8refit.live.names import is_not_a_weight
from fp8refit.live.parameters import live_tensors
from fp8refit.live.slots import (
    SCALE_SUFFIX,
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
from fp8refit.tracing.boxes import Boxes, fault_of_cover, pieces_of, written_by
from fp8refit.tracing.reads import partly_read, refusals_of
from fp8refit.tracing.records import Base, Computed, Copy
from fp8refit.tracing.rules import KernelRules, Why
from fp8refit.tracing.staged import Staged, fault_of_recipe
from fp8refit.tracing.stored import (
    TWO_HALVES,
    are_matrices,
    block_rows,
    blocks_of,
    box_of,
    codes_of,
    global_of,
    matrices,
    own_tensors,
    why_not_stored,
    with_halves_swapped,
)
from fp8refit.tracing.twin import Twin, refresh_of_constant
from fp8refit.tracing.unused import unused_names

logger = logging.getLogger(__name__)

BIAS = "bias"


def read_inventory(model: nn.Module, rules: KernelRules, twin: Twin) -> Inventory:
    """Return everything that a refit of `model` writes, and everything it cannot write.

    Args:
        model: The live model.
        rules: What its engine's kernels do.
        twin: What the loader of its twin did.
    """
    reading = Reading(list(model.named_modules()), rules, twin)
    return replace(reading.inventory(type(model).__name__), live=live_tensors(model))


def twin_name(prefix: str, name: str) -> str:
    """The twin's name of a live tensor, without LoRA wrappers around layers."""
    parts = [part for part in prefix.split(".") if part not in ("", "base_layer")]
    return ".".join([*parts, name])


class Held(NamedTuple):
    """A live tensor that a refit fills."""

    twin_name: str
    module: nn.Module
    name: str
    weight: Tensor
    scale: Tensor | None
    global_scale: Tensor | None = None


class Reading:
    """Reads slots of some modules of a live model.

    Args:
        modules: The modules, each with its name.
        rules: What the engine's kernels do.
        twin: What the loader of the model's twin did.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], rules: KernelRules, twin: Twin) -> None:
        self._modules, self._rules, self._twin = modules, rules, twin
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
            twin_name(prefix, name): tensor for prefix, module in modules for name, tensor in own_tensors(module)
        }
        filled = {*self._copies, *self._computed, *self._reasons}
        self._filled = {tensor.data_ptr() for name, tensor in self._live.items() if twin.firsts.get(name) in filled}
        """Addresses of live tensors that a checkpoint fills, under whatever name."""
        self.held: list[Held] = []
        """What slots and refreshes fill."""
        self._seen: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
        self._slots: list[Slot] = []
        self._stacks: dict[str, Stacked] = {}
        self._padding: list[Tensor] = []
        self._refreshes: list[Refresh] = []
        self._refusals: list[Refusal] = []
        self._shared: dict[str, str] = {}
        self._container = twin.container
        self._faults: dict[object, str | None] = {}
        self._boxes: dict[object, list[list[Boxes]] | None] = {}
        """The boxes of all copies into a parameter, keyed by the copies, because many parameters are filled the same way."""
        for prefix, module in modules:
            self._add(prefix, module)

    def _add(self, prefix: str, module: nn.Module) -> None:
        """Read the tensors of `module`, without its children."""
        own = self._own_tensors(prefix, module)
        for name in [name for name in own if self._is_constant(prefix, name, own)]:
            self._add_constant(prefix, name, own.pop(name))
        why = self._rules.why_refused(module)
        if why is None and own:
            why = why_not_stored(self._rules, prefix, module, own) or self._why_not_loaded(prefix, module, own)
        if why is not None:
            self._refuse(prefix, module, why)
            return
        block_format = self._format_of(module, own)
        for name, tensor in own.items():
            if name == BIAS and block_format is not None and block_format.is_tiled:
                self._add_staged(prefix, module, name, tensor, None, {}, bias_in_order)
            elif not name.endswith(SCALE_SUFFIX) and not _is_global(name, own):
                scale, global_scale = own.get(name + SCALE_SUFFIX), own.get(name + GLOBAL_SUFFIX)
                held = Held(twin_name(prefix, name), module, name, tensor, scale, global_scale)
                self.held.append(held)
                self._add_tensor(prefix, held)

    def written(self) -> Inventory:
        """Return what a refit of these modules writes."""
        return Inventory(
            slots=tuple(self._slots),
            stacked=tuple(self._stacks.values()),
            padding=tuple(self._padding),
            refreshes=tuple(self._refreshes),
            refusals=tuple(self._refusals),
        )

    def inventory(self, model: str) -> Inventory:
        """Return what was read of all modules of a model.

        Args:
            model: Its class.
        """
        is_quantized = any(held.scale is not None for held in self.held)
        if not (is_quantized or self._refusals) and self._rules.to_quantize is not None:
            logger.warning(
                "%s holds no quantized weight, and is refitted as it is. If that is not wanted: %s",
                model,
                self._rules.to_quantize,
            )
        naming, held = self._twin.naming, {slot.name for slot in self._slots}
        if not self._refusals:  # a refused layer may hold its weights under other names
            self._refuse_absent(held)
        partly = partly_read(self._twin.traced, naming.tensors)
        left_out = {name: None for name, read in partly.items() if not (read.boxes or read.reason)}
        unused = set(unused_names(naming.tensors, left_out))
        partly = {name: read for name, read in partly.items() if name not in unused}
        if self._refusals:
            self._tell_of_names(partly)
        elif self._twin.is_alone:
            self._refusals += refusals_of([partly])
        stacked = tuple(found for stack in naming.stacked if (found := _held_of(stack, held)) is not None)
        stacked = (*stacked, *self._stacks.values())
        names = held.union(stack.name for stack in stacked)
        second = {name: first for name, first in naming.tied.items() if name not in held} | self._shared
        aliases = second | {name: first for name, first in naming.aliases.items() if name not in names}
        return replace(
            self.written(),
            aliases={name: first for name, first in aliases.items() if first in names},
            unneeded=(*unused, *(name for name, first in naming.aliases.items() if first in unused), *naming.beside),
            stacked=stacked,
            buffers=naming.buffers,
            container=self._container,
            written_as=self._twin.written_as,
            partly_read={} if self._twin.is_alone else partly,
            rounds_once=any(slot.weight.is_cuda for slot in self._slots),
        )

    def _refuse_absent(self, held: Collection[str]) -> None:
        """Refuse what the loader fills and the live model lacks: the engine would serve without it."""
        here = {self._twin.firsts.get(name) for name in self._live}
        filled = [(copy.parameter, copy.source) for copy in self._twin.traced.copies if copy.source]
        for computed in self._twin.traced.computed:
            filled += [(computed.parameter, base.name) for base in computed.recipe.bases() if not base.is_parameter]
        for name in dict.fromkeys(name for name, source in filled if name not in here and source not in held):
            reason = "is filled by the model's loader, but the live model does not have it"
            remedy = "If the engine was booted with dummy weights, boot it from a checkpoint; if not, ask for support"
            self._refusals.append(Refusal(module=name, reason=reason, remedy=remedy))

    def _tell_of_names(self, partly: Mapping[str, PartlyRead]) -> None:
        """Put checkpoint tensors that the loader did not take first among the refusals: they explain unfilled weights."""
        none = "is left out by the model's loader" if self._twin.is_alone else ""
        reasons = {name: read.reason or none for name, read in partly.items() if not read.boxes}
        untaken = [(name, reason) for name, reason in reasons.items() if reason and not is_not_a_weight(name)]
        if untaken:
            name, reason = untaken[0]
            others = f", like {len(untaken) - 1} others" if len(untaken) > 1 else ""
            remedy = "Check that the engine loads such a checkpoint; if it does, ask for support"
            self._refusals.insert(0, Refusal(module=name, reason=reason + others, remedy=remedy))

    def _own_tensors(self, prefix: str, module: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of `module`, and its buffers that the loader writes."""
        own = dict(own_tensors(module, ("_parameters",)))
        written = self._copies.keys() | self._computed.keys() | self._reasons.keys()
        loaded = ((name, t) for name, t in module._buffers.items() if twin_name(prefix, name) in written)
        own |= {name: tensor for name, tensor in loaded if tensor is not None}
        kept = self._rules.kept(module)
        found = {}
        for name, tensor in own.items():
            if name in kept:
                continue
            full_name = twin_name(prefix, name)
            place = tensor.data_ptr(), tensor.shape, tensor.stride()
            first = self._seen.setdefault(place, full_name) if tensor.numel() else full_name
            if first != full_name:
                self._share(prefix, module, name, first)
            else:
                found[name] = tensor
        return found

    def _is_constant(self, prefix: str, name: str, own: Mapping[str, Tensor]) -> bool:
        """Whether a new model fills a parameter with one number and no checkpoint does: a norm that only some layers use."""
        value, tensor = self._twin.constants.get(twin_name(prefix, name)), own[name]
        if value is None or name.endswith(SCALE_SUFFIX) or name + SCALE_SUFFIX in own:
            return False
        return (value.shape, value.dtype) == (tensor.shape, tensor.dtype) and tensor.data_ptr() not in self._filled

    def _add_constant(self, prefix: str, name: str, tensor: Tensor) -> None:
        """Add a step that restores a parameter's initial value, which a dummy boot and sleep overwrite."""
        value = self._twin.constants[twin_name(prefix, name)]
        self._refreshes.append(refresh_of_constant(f"{prefix}.{name}", tensor, value))

    def _share(self, prefix: str, module: nn.Module, name: str, first: str) -> None:
        """Make the checkpoint names loaded into a tensor aliases of those loaded into `first`, whose storage it shares."""
        mine, theirs = (self._twin.firsts.get(each, each) for each in (twin_name(prefix, name), first))
        otherwise = self._computed.keys() | self._reasons.keys()
        if mine == theirs or mine not in self._copies.keys() | otherwise:
            return
        copies = (self._copies.get(each, ()) for each in (mine, theirs))
        of_mine, of_theirs = ({(c.into, c.start, c.runs): c.source for c in found} for found in copies)
        if of_mine.keys() != of_theirs.keys() or not otherwise.isdisjoint((mine, theirs)):
            reason = f"`{name}` shares its memory with `{first}`, but the model's loader may fill each in its own way"
            self._refuse(prefix, module, (reason, "fp8refit does not know what made them one; ask for support"))
        else:
            self._shared |= {
                source: of_theirs[place] for place, source in of_mine.items() if of_theirs[place] != source
            }

    def _refuse(self, prefix: str, module: nn.Module, why: tuple[str, str]) -> None:
        self._refusals.append(Refusal(module=prefix or type(module).__name__, reason=why[0], remedy=why[1]))

    def _format_of(self, module: nn.Module, own: Mapping[str, Tensor]) -> BlockFormat | None:
        """The format of a module's quantized tensors; None if it has none."""
        return self._rules.kernel_of(module).format if any(name.endswith(SCALE_SUFFIX) for name in own) else None

    def _why_not_loaded(self, prefix: str, module: nn.Module, own: Mapping[str, Tensor]) -> Why:
        """Say why the live tensors are not those of the twin, each filled exactly once; None if they are."""
        block_format = self._format_of(module, own)
        for name, tensor in own.items():
            is_coded = block_format is not None and name + SCALE_SUFFIX in own
            shape = (
                block_format.shape_of(tensor.shape) if block_format is not None and is_coded else tuple(tensor.shape)
            )
            twin = self._twin.tensors.get(twin_name(prefix, name))
            is_scale = name.endswith(SCALE_SUFFIX) or _is_global(name, own)
            if is_scale and (twin is None or twin.dtype is tensor.dtype):
                continue  # scales follow from the values of their weight
            if twin is None:
                return f"holds `{name}`, which is not there when the model is built", "fp8refit does not know it yet"
            is_quantized_later = name + SCALE_SUFFIX in own and twin.dtype in SOURCE_DTYPES
            if block_format is not None and block_format.is_tiled and twin.shape != shape:
                padded = "is padded to whole tiles of its kernel"
                return f"`{name}` {padded}, {list(twin.shape)} to {list(shape)}", self._rules.kernel_of(module).remedy
            if twin.shape != shape or not (twin.dtype is tensor.dtype or is_quantized_later):
                found = f"{dtype_name(tensor.dtype)} {list(shape)}"
                return f"holds `{name}` as {found}, and was built with {twin}", "fp8refit does not know its kernel yet"
            fault = self._fault_of(twin_name(prefix, name), twin)
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
        full_name = twin_name(prefix, name)
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

    def _add_tensor(self, prefix: str, held: Held) -> None:
        _, module, name, weight, scale, global_scale = held
        pieces = self._pieces(prefix, name)
        is_swapped = name == TWO_HALVES and self._rules.swaps_halves(module)
        if pieces is not None and is_swapped:
            pieces = with_halves_swapped(pieces, weight.shape[1])
        common: dict[str, Any] = {}
        starts: dict[int, int] | None = None
        kernel = self._rules.kernel_of(module) if scale is not None else None
        block_format = kernel.format if kernel is not None else None
        if scale is not None and block_format is not None:
            common = {"format": block_format}
            self._container = self._container.or_other(block_format)
            shape = block_format.shape_of(weight.shape)
            if pieces is not None and all(are_matrices(boxes, len(shape)) for _, boxes in pieces):
                num_rows = shape[-2] if block_format.is_tiled else scale.shape[-2]
                starts = block_rows([boxes for _, boxes in pieces], shape, num_rows, block_format)
        zeros = [copy for copy in self._copies.get(self._twin.firsts[twin_name(prefix, name)], ()) if not copy.source]
        if scale is not None and zeros:
            reason = f"`{name}` is padded when it is loaded, and the scales of the padding are unknown"
            self._refuse(prefix, module, (reason, "Boot with sizes that fit the engine's"))
            return
        is_stack = scale is not None or (
            pieces is not None and weight.ndim == 3 and all(_is_transposed_stack(boxes) for _, boxes in pieces)
        )
        is_mixed = pieces is not None and not is_stack and any(boxes.is_transposed for _, boxes in pieces)
        if pieces is None or is_mixed or (scale is not None and starts is None):
            self._add_staged(prefix, module, name, weight, scale, common, is_swapped=is_swapped)
            return
        if kernel is not None:
            common["kernel"] = kernel.name
        for copy, boxes in pieces:
            for matrix in matrices(boxes) if is_stack else (boxes,):
                if scale is not None and starts is not None and block_format is not None:
                    common["scale"] = blocks_of(scale, matrix, starts, block_format)
                    common["global_scale"] = global_of(global_scale, matrix)
                self._slots.append(self._slot(copy.source, matrix, weight, prefix, is_stack=is_stack, **common))
        for copy in zeros:
            boxes_of_zeros = written_by(copy, tuple(weight.shape)) or ()
            self._padding += (box_of(weight, box, range(weight.ndim)) for box in boxes_of_zeros)

    def _add_staged(
        self,
        prefix: str,
        module: nn.Module,
        name: str,
        weight: Tensor,
        scale: Tensor | None,
        common: dict[str, Any],
        in_order: Callable[[Tensor], Tensor] | None = None,
        *,
        is_swapped: bool = False,
    ) -> None:
        """Keep the sources of a tensor that is not a plain copy."""
        first = self._twin.firsts[twin_name(prefix, name)]
        computed = self._computed.get(first, [])
        faults = (fault_of_recipe(each, weight.dtype, weight.numel()) for each in computed)
        fault = next((fault for fault in faults if fault is not None), None)
        bases = {base for each in computed for base in each.recipe.bases() if base.is_parameter and base.name != first}
        others = {base: self._live[base.name] for base in bases if base.name in self._live}
        if others.keys() != bases or any(other.dtype not in SOURCE_DTYPES for other in others.values()):
            fault = "is computed from weights that the engine keeps in another form"
        if not weight.is_contiguous() or (scale is not None and weight.ndim != 2):
            fault = "is filled in an order that fp8refit cannot reproduce in its storage"
        block_format = common.get("format")
        if block_format is not None and block_format.amax_over.reaches_beyond and not self._twin.is_alone:
            fault = "is not copied in order, and its scales also cover what other ranks hold"
        if block_format is not None and block_format.needs_maximum:
            fault = "is not copied in order, and has one scale"
        remedy = "Leave this layer in BF16"
        if is_swapped:
            fault, remedy = (
                "is not copied in order, and its kernel keeps its halves swapped",
                "Choose a kernel that does not",
            )
        if fault is not None:
            self._refuse(prefix, module, (f"`{name}` {fault}", remedy))
            return
        copies = self._copies.get(first, [])
        staged = Staged(
            weight=weight, copies=copies, computed=computed, others=others, scale=scale, slot=common, in_order=in_order
        )
        self._slots += staged.slots(prefix, self._twin.naming.tensors)
        written = (weight,) if scale is None else (weight, scale)
        self._refreshes.append(Refresh(name=f"{prefix}.{name}", run=staged.refresh, written=written))

    def _slot(
        self, source: str, boxes: Boxes, tensor: Tensor, module: str, *, is_stack: bool = False, **others: Any
    ) -> Slot:
        """Return the slot of a box of a live tensor. Matrices of a stack become separate slots, under names we make up."""
        full_shape, is_transposed = self._twin.naming.tensors[source].shape, boxes.is_transposed
        if is_transposed:
            boxes, full_shape = boxes.transposed(), (full_shape[0], full_shape[2], full_shape[1])
        read, dims = boxes.read, boxes.dims
        if is_stack and len(full_shape) == 3:
            index, full_stack = read[0][0], full_shape
            name = f"{source}[{index}]"
            known = self._stacks.get(source)
            parts = {**(known.parts if known is not None else {}), name: (index, 0)}
            shape = full_stack[0], full_stack[1], full_stack[2]
            self._stacks[source] = Stacked(name=source, shape=shape, parts=parts, is_transposed=is_transposed)
            source, full_shape, read, dims = name, full_shape[1:], read[1:], dims[1:]
        weight = codes_of(tensor, boxes, dims, others.get("format"))
        starts = tuple(start for start, _ in read)
        offset = starts if any(starts) else ()
        return Slot(name=source, full_shape=full_shape, weight=weight, offset=offset, module=module, **others)


def _is_transposed_stack(boxes: Boxes) -> bool:
    return boxes.is_transposed and are_matrices(boxes, 3)


def _is_global(name: str, own: Mapping[str, Tensor]) -> bool:
    """Whether a live tensor is the one scale of a weight beside those of its blocks."""
    return name.endswith(GLOBAL_SUFFIX) and name.removesuffix(GLOBAL_SUFFIX) + SCALE_SUFFIX in own


def _held_of(stack: Stacked, held: frozenset[str] | set[str]) -> Stacked | None:
    """Return this rank's part of a stack."""
    parts = {name: place for name, place in stack.parts.items() if name in held}
    return replace(stack, parts=parts) if parts else None
