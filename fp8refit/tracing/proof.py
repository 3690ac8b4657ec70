"""Proves by value what a trace says about a loader.

The twin is built again. This time the tensors of one layer of each kind, and of what is in no layer, get memory, and the
engine's own loader fills them from random values, in the form of a checkpoint that the engine boots from. The code of a refit
writes the same values into tensors laid out like the live ones. Both must end up with the same bits. What an engine does after
loading is not proved.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from fp8refit.kernels.placement import codes_in_rows, scales_in_rows
from fp8refit.kernels.reference import (
    MARLIN_GLOBAL,
    global_scale_of,
    put_two_levels,
    quantize_reference,
    quantize_two_levels,
)
from fp8refit.live.formats import GLOBAL_SUFFIX, BlockFormat
from fp8refit.live.slots import (
    FP8_DTYPE,
    SCALE_SUFFIX,
    Inventory,
    Refusal,
    Slot,
    TensorMeta,
    Write,
    stored_as,
)
from fp8refit.tracing.kinds import Place, kinds_of
from fp8refit.tracing.random_values import RandomValues
from fp8refit.tracing.reading import Held, Reading, twin_name
from fp8refit.tracing.rules import KernelRules
from fp8refit.tracing.stored import TWO_HALVES, is_inside, own_name
from fp8refit.tracing.twin import EmptyOnMeta, Twin, named_tensors

_READ_AS_NUMBER = 4096
"""A loader may read the values of tensors up to this size, whatever it does with them."""
_LARGE = 1 << 24
"""Elements of a tensor in no layer that is proved apart from the others if memory is short."""
_BYTES_PER_ELEMENT = 6
"""What the proof of a tensor takes at most: its values, what the loader makes of them, and what a refit does."""
_MOST_FACTORS = 18
"""Powers of two between the least scale of a block, 2^-9, and the greatest, 448."""
_SPARE_BYTES = 1 << 30
_MOST_BYTES = 10 << 30
"""What several layers together may take."""
_HOST = torch.device("cpu")
_EXACT = {FP8_DTYPE: "exact in FP8", torch.float16: "exact in FP16"}
_REMEDY = "A refit would not write what the engine loads; change the model's load_weights, or ask for support"


def with_proof(inventory: Inventory, model: nn.Module, rules: KernelRules, twin: Twin) -> Inventory:
    """Return `inventory` with a function that proves its slots, if the twin can be built again.

    Args:
        inventory: What was read of the live model.
        model: The live model.
        rules: What its engine's kernels do.
        twin: What the loader of its twin did.
    """
    if inventory.refusals or twin.build is None:
        return inventory
    return replace(inventory, prove=_Proof(model, rules, twin, inventory.slots).refusals)


@dataclass(frozen=True)
class _Proof:
    model: nn.Module
    rules: KernelRules
    twin: Twin
    slots: Sequence[Slot]

    def refusals(self, write: Write, device: torch.device) -> tuple[Refusal, ...]:
        """Return what differs. What was proved once is not proved again.

        Args:
            write: Writes a policy into an inventory.
            device: The live model's. Host memory is used if it has no room.
        """
        kinds = kinds_of(self.model, self.twin, self.slots)
        key = frozenset(kinds)
        if key not in self.twin.proved:
            batches = self._batches(kinds.values(), min(_room_on(device), _MOST_BYTES))
            found = (refusal for names in batches for refusal in self._differing(names, write, device))
            self.twin.proved[key] = tuple(dict.fromkeys(found))
        return self.twin.proved[key]

    @cached_property
    def made_of(self) -> dict[str, set[str]]:
        """The checkpoint tensors of which the loader was seen to make each tensor."""
        found: dict[str, set[str]] = {each.parameter: set() for each in self.twin.traced.objections if each.parameter}
        for copy in self.twin.traced.copies:
            found.setdefault(copy.parameter, set()).update(filter(None, [copy.source]))
        for each in self.twin.traced.computed:
            names = (base.name for base in each.recipe.bases() if not base.is_parameter)
            found.setdefault(each.parameter, set()).update(names)
        return found

    def _batches(self, kinds: Iterable[Sequence[str]], room: int) -> Iterator[set[str]]:
        """Yield the first names of tensors to prove together: as many as there is room for, but each layer whole."""
        parts: list[set[str]] = []
        for names in kinds:
            apart = {n for n in names if Place.of(n).number < 0 and prod(self.twin.tensors[n].shape) > _LARGE}
            parts += [{self.twin.firsts[name]} for name in apart]
            parts.append({self.twin.firsts[name] for name in names if name not in apart})
        for computed in self.twin.traced.computed:  # what is computed from other parameters needs them
            for part in (part for part in parts if computed.parameter in part):
                part.update(base.name for base in computed.recipe.bases() if base.is_parameter)
        batch: set[str] = set()
        for part in parts:
            if batch and self._num_bytes(batch | part) > room:
                yield batch
                batch = set()
            batch |= part
        yield batch

    def _num_bytes(self, names: Collection[str]) -> int:
        return _BYTES_PER_ELEMENT * sum(prod(self.twin.tensors[name].shape) for name in names)

    def _differing(self, names: set[str], write: Write, device: torch.device) -> list[Refusal]:
        where = device if self._num_bytes(names) <= _room_on(device) else _HOST
        try:
            return list(_Trial(self, names, where).differing(write))
        except torch.OutOfMemoryError:
            return list(_Trial(self, names, _HOST).differing(write))
        finally:
            if where.type == "cuda":
                torch.cuda.empty_cache()


class _Trial:
    """Some of the twin's tensors, filled by the loader and by a refit.

    Args:
        proof: What is proved.
        names: First names of the tensors.
        device: Where.
    """

    def __init__(self, proof: _Proof, names: set[str], device: torch.device) -> None:
        self._proof, self._twin, self._rules, self._device = proof, proof.twin, proof.rules, device
        self._random = RandomValues(device)
        self._real = {self._twin.made_by[name] for name in names if name in self._twin.made_by}
        # What is not made by `torch.empty` has memory in any twin.
        self._names = names | {first for name, first in self._twin.firsts.items() if name not in self._twin.made_by}
        reading = Reading(list(self._like_live(proof.model)), proof.rules, self._twin)
        self._held, self._inventory = reading.held, reading.written()
        self._slots: dict[str, list[Slot]] = {}
        """The slots of each checkpoint tensor."""
        stacks = {part: stack.name for stack in self._inventory.stacked for part in stack.parts}
        for slot in self._inventory.slots:
            self._slots.setdefault(stacks.get(slot.name, slot.name), []).append(slot)
        self._coded = self._taken_as_codes()
        self._exact: dict[str, set[str]] = {kind: set() for kind in _EXACT.values()}
        """The checkpoint tensors whose values a dtype of the twin must be able to hold."""
        for name, sources in proof.made_of.items():
            if (dtype := self._twin.tensors[name].dtype) in _EXACT:
                self._exact[_EXACT[dtype]] |= sources

    def differing(self, write: Write) -> Iterator[Refusal]:
        """Yield a refusal for each tensor that the loader fills otherwise than a refit."""
        policy, given = self._values()
        where, doing = (
            ", ".join(refresh.name for refresh in self._inventory.refreshes),
            "what it computes cannot be repeated",
        )
        try:
            if not (refusals := self._inventory.refusals):
                write(self._inventory, policy)
            where, doing = "", "it fails with real values"
            found = None
            with suppress(Exception):  # without the rest of the checkpoint, which few loaders need
                found = self._loaded(given)
            loaded, before = found or self._loaded(given | self._others(given))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # noqa: BLE001 - a loader may raise anything, and so may what repeats it
            where, doing = where or type(self._proof.model).__name__, f"{doing} ({type(error).__name__}: {error})"
            refusals = (Refusal(module=where, reason=f"the model's loader was tried: {doing}", remedy=_REMEDY),)
        yield from refusals
        if refusals:
            return
        coded = {held.twin_name + SCALE_SUFFIX for held in self._held if self._is_coded(held)}
        names = [held.twin_name for held in self._held if not self._is_as_loaded(held, loaded)]
        names += [n for n, tensor in before.items() if n not in coded and not _are_equal(loaded.get(n), tensor)]
        for name in names:
            reason = "the model's loader does something with it that a trace cannot follow"
            yield Refusal(module=name, reason=reason, remedy=_REMEDY)

    def _loaded(self, given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the twin's tensors after loading; and before, those that its loader was not seen to fill."""
        assert self._twin.build is not None, "can be proved"
        mode = EmptyOnMeta(self._real, self._device)
        with self._twin.build(mode) as model:
            named = dict(named_tensors(model))
            if mode.numbers_of(named) != self._twin.made_by:
                raise RuntimeError("the model is built in another way each time")
            for number in self._real:
                self._random.fill(mode.made[number])
            kept = [name for name, tensor in named.items() if not tensor.is_meta and name not in self._proof.made_of]
            before = {name: named[name].clone() for name in kept if self._twin.firsts[name] == name}
            with torch.no_grad():
                model.load_weights((name, tensor.clone()) for name, tensor in given.items())
            return dict(named_tensors(model)), before

    def _like_live(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules like the live ones that hold some of the tensors, in other memory that is filled with noise."""
        places: dict[object, Tensor] = {}
        for prefix, module in model.named_modules():
            clone: nn.Module = object.__new__(type(module))
            clone.__dict__ = {**module.__dict__, "_parameters": {}, "_buffers": {}}
            for kind in ("_parameters", "_buffers"):
                for key, tensor in getattr(module, kind).items():
                    own = own_name(module, key).removesuffix(SCALE_SUFFIX).removesuffix(GLOBAL_SUFFIX)
                    name = twin_name(prefix, own)
                    if tensor is not None and not is_inside(module, key) and self._twin.firsts.get(name) in self._names:
                        place = tensor.data_ptr(), tensor.shape, tensor.stride()
                        if place not in places:
                            places[place] = torch.empty_strided(*place[1:], dtype=tensor.dtype, device=self._device)
                            self._random.fill(places[place])
                        getattr(clone, kind)[key] = places[place]
            if clone._parameters or clone._buffers:
                yield prefix, clone

    def _taken_as_codes(self) -> set[str]:
        """Return the checkpoint tensors that the loader takes as codes and scales, and so do all slots that they go to."""
        scaled = [held for held in self._held if held.scale is not None]
        coded = {
            name
            for name, slots in self._slots.items()
            if self._twin.written_as.get(name, (name,))
            and all(
                slot.format is not None and not slot.format.is_shared and slot.format.block_at(slot.origin) is not None
                for slot in slots
            )
            and not any(stack.name == name and stack.is_transposed for stack in self._inventory.stacked)
        }
        in_part = [held for held in scaled if self._twin.tensors[held.twin_name].dtype is not FP8_DTYPE]
        while in_part:
            coded -= set().union(*map(self._made_of, in_part))
            in_part = [
                held for held in scaled if not coded.isdisjoint(made := self._made_of(held)) and not made <= coded
            ]
        return coded

    def _made_of(self, held: Held) -> set[str]:
        return self._proof.made_of.get(self._twin.firsts[held.twin_name], set())

    def _is_coded(self, held: Held) -> bool:
        return held.scale is not None and self._made_of(held) <= self._coded

    def _values(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return a policy for the slots, and what a checkpoint with the same values holds for these tensors."""
        policy: dict[str, Tensor] = {}
        given: dict[str, Tensor] = {}
        container = self._twin.container
        used = set().union(*(self._proof.made_of.get(name, ()) for name in self._names))
        for name, meta in self._twin.naming.tensors.items():
            slots = self._slots.get(name, [])
            if name in self._coded:
                block_format = slots[0].format
                assert block_format is not None, f"{name=}"
                codes = self._random.make("codes", meta.shape)
                scales = self._random.make("scales", block_format.scale_shape(meta.shape))
                policy |= {name: codes, name + SCALE_SUFFIX: scales}
                for spelled, start, part in stored_as(self._twin.written_as.get(name, (name,)), meta.shape):
                    given[spelled] = _box(codes, start, part)
                    blocks = block_format.block_at(start)
                    assert blocks is not None, f"{spelled=} {start=}"
                    shape = block_format.scale_shape(part)
                    scale = _box(scales, blocks, shape).reshape(container.shape_of(shape, block_format))
                    given[spelled + container.scale_suffix(block_format)] = scale
            elif slots or name in used or prod(meta.shape) <= _READ_AS_NUMBER:
                kind = next((kind for kind in _EXACT.values() if name in self._exact[kind]), "any")
                if any(slot.format is not None and slot.format.needs_own_maximum for slot in slots):
                    kind = "exact in FP16"  # larger ones are Inf in Marlin's scale of a weight
                given[name] = self._random.make(kind, meta.shape)
                if slots:
                    policy[name] = given[name]
        return policy, given

    def _others(self, given: Collection[str]) -> dict[str, Tensor]:
        """Return the rest of the checkpoint, on the meta device."""
        return {
            name: torch.empty(meta.shape, dtype=meta.dtype, device="meta")
            for name, meta in self._twin.naming.tensors.items()
            if name not in given and name not in self._coded
        }

    def _is_as_loaded(self, held: Held, loaded: Mapping[str, Tensor]) -> bool:
        """Whether the loader's tensor is what a refit writes."""
        tensor, weight, scale = loaded.get(held.twin_name), held.weight, held.scale
        if tensor is None or tensor.is_meta or TensorMeta.of(tensor) != self._twin.tensors[held.twin_name]:
            return False
        is_swapped = held.name == TWO_HALVES and self._rules.swaps_halves(held.module)
        if is_swapped:
            weight = weight.view(torch.uint8).roll(weight.shape[1] // 2, 1).view(weight.dtype)
        if scale is None:
            return _are_equal(tensor, weight)
        if is_swapped:
            scale = scale.roll(scale.shape[1] // 2, 1)
        if self._is_coded(held):
            return _are_equal(tensor, weight) and _are_equal(loaded.get(held.twin_name + SCALE_SUFFIX), scale)
        block_format = self._rules.kernel_of(held.module).format
        assert block_format is not None, f"{held.twin_name=}"
        if held.global_scale is not None:
            assert scale is not None, f"{held=}"
            stacks = weight, scale, held.global_scale, tensor.to(self._device, torch.bfloat16)
            is_stack = tensor.ndim == 3
            return all(
                _are_two_levels(values, live, block_format, is_whole=self._twin.is_alone, is_expert=is_stack)
                for *live, values in (zip(*stacks, strict=True) if is_stack else [stacks])
            )
        if block_format.is_tiled:
            weight, scale = codes_in_rows(weight), scales_in_rows(scale)
        matrices = (
            each if each.ndim == 3 else each[None] for each in (weight, scale, tensor.to(self._device, torch.bfloat16))
        )
        return all(
            _are_quantized(codes, scales, values, block_format)
            for stored in zip(*matrices, strict=True)
            for codes, scales, values in _with_own_blocks(stored, block_format)
        )


def _are_quantized(codes: Tensor, scales: Tensor, values: Tensor, block_format: BlockFormat) -> bool:
    """Whether codes and scales are what a rank's values become. Other ranks' values may make the scale of a block greater."""
    own_codes, own_scales, _ = quantize_reference(values, block_format)
    if not block_format.amax_over.reaches_beyond:
        return _are_equal(codes, own_codes) and torch.equal(scales, own_scales)
    given_codes, _, _ = quantize_reference(values, block_format, given=scales)
    return _are_equal(codes, given_codes) and bool((scales >= own_scales).all())


def _are_two_levels(
    values: Tensor, live: Sequence[Tensor], block_format: BlockFormat, *, is_whole: bool, is_expert: bool
) -> bool:
    """The same for scales of two levels, with all values of the weight or with a rank's."""
    weight, scale, global_scale = live
    largest = values.abs().amax().to(torch.float32).reshape(1)
    own = global_scale_of(largest, block_format.scale_format)
    for factor in range(_MOST_FACTORS) if block_format.is_tiled else (0,):  # by which it was lowered for Marlin
        over_all = global_scale.reshape(1) * 2.0**factor / (MARLIN_GLOBAL if block_format.is_tiled else 1.0)
        codes, scales = quantize_two_levels(values, block_format, over_all)
        again = [
            torch.empty_like(each, memory_format=torch.contiguous_format) for each in (weight, scale, global_scale)
        ]
        own_maximum = None if is_expert else largest
        put_two_levels(again[0], again[1], again[2], (codes, scales, over_all), block_format.placement, own_maximum)
        if all(_are_equal(*pair) for pair in zip(live, again, strict=True)):
            return torch.equal(over_all, own) if is_whole else bool((over_all >= own).all())
    return False


def _with_own_blocks(stored: tuple[Tensor, ...], block_format: BlockFormat) -> Iterable[tuple[Tensor, ...]]:
    """Return codes, scales and values of a matrix, or of its halves if these have separate blocks."""
    codes, scales, _ = stored
    is_whole = scales.shape == block_format.scale_shape(codes.shape)
    return [stored] if is_whole else zip(*(each.chunk(2) for each in stored), strict=True)


def _box(tensor: Tensor, start: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """Return a box of a stack of matrices, as a tensor of `shape`."""
    sizes = (*(1,) * (tensor.ndim - len(shape)), *shape)
    return tensor[tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))].reshape(shape)


def _are_equal(tensor: Tensor | None, expected: Tensor) -> bool:
    """Whether a tensor is another one, bit for bit."""
    if tensor is None or tensor.is_meta or TensorMeta.of(tensor) != TensorMeta.of(expected):
        return False
    raw, as_expected = (each.contiguous().view(-1).view(torch.uint8) for each in (tensor.to(expected.device), expected))
    return torch.equal(raw, as_expected)


def _room_on(device: torch.device) -> int:
    """Bytes of memory that the proof may use on a device."""
    return max(0, torch.cuda.mem_get_info(device)[0] - _SPARE_BYTES) if device.type == "cuda" else _MOST_BYTES
