"""A model that drafts tokens for another one: what its checkpoint holds, and what a refit writes of it alone."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fp8refit.errors import InvalidSourceError
from fp8refit.live.drafts import DRAFT, named_apart
from fp8refit.live.names import is_kv_scale, is_not_a_weight
from fp8refit.live.slots import SCALE_SUFFIX, Inventory, Refusal, TensorMeta
from fp8refit.tracing.inventory import inventory_of
from fp8refit.tracing.records import Traced
from fp8refit.tracing.rules import KernelRules
from fp8refit.tracing.twin import Naming, Twin, named_tensors, trace_twin

TABLES = frozenset((torch.int64, torch.bool))
"""dtypes of tables of token ids."""


class DraftModel:
    """A model that drafts tokens.

    Args:
        network: The live model.
        read_headers: Returns every tensor of its checkpoint, as the files say: transformers knows no layers that draft tokens.
        is_plain: Whether it is a model of its own kind, not made for a target.
        is_apart: Whether its checkpoint is another than the target's; always, if it is plain.
        has_dummy_weights: Whether it was booted with dummy weights.
        problems: Other reasons not to refit it.
        remedy: What to boot then.

    Attributes:
        network: The live model.
        is_plain: As above.
        is_apart: As above.
        refusals: Why it cannot be refitted, before anything of it is read.
    """

    def __init__(
        self,
        network: nn.Module,
        read_headers: Callable[[], Mapping[str, TensorMeta]],
        *,
        is_plain: bool,
        is_apart: bool,
        has_dummy_weights: bool,
        problems: Sequence[str] = (),
        remedy: str,
    ) -> None:
        self.network, self.is_plain, self.is_apart = network, is_plain, is_plain or is_apart
        self._read_headers, self._remedy = read_headers, remedy
        dummy = ("was booted with dummy weights, and some of what its checkpoint has is never sent",)
        self.refusals = tuple(map(self._refusal, (*(dummy if has_dummy_weights else ()), *problems)))

    @cached_property
    def stored(self) -> Mapping[str, TensorMeta]:
        """What its checkpoint holds, without scales.

        Raises:
            InvalidSourceError: There is no checkpoint of safetensors.
        """
        return {name: meta for name, meta in self._read_headers().items() if not name.endswith(SCALE_SUFFIX)}

    def naming(self, is_beside: Callable[[str], bool]) -> Naming | Refusal:
        """What its loader may take; a refusal if that is unknown.

        Args:
            is_beside: Whether the target's checkpoints hold a name beside the target.
        """
        try:
            stored = self.stored
        except (InvalidSourceError, OSError, ValueError) as error:
            return self._refusal(f"has weights whose names are unknown ({error})")
        weights = {name: m for name, m in stored.items() if not (is_not_a_weight(name) or is_kv_scale(name))}
        odd = {name for name, meta in weights.items() if not meta.dtype.is_floating_point}
        packed = [name for name in odd if weights[name].dtype not in TABLES and (self.is_apart or is_beside(name))]
        if packed:
            return self._refusal(f"has packed weights in its checkpoint, such as {min(packed)}")
        return Naming(tensors={name: meta for name, meta in weights.items() if name not in odd})

    def trace(self, twin: Any, naming: Naming, is_beside: Callable[[str], bool], **options: Any) -> Twin:
        """Run the loader of its twin.

        Args:
            twin: It, built again on the meta device.
            naming: What `naming` returned.
            is_beside: See `naming`.
            options: See `trace_twin`.
        """
        found = trace_twin(twin, naming, **options)
        # Loaders skip what the target has, of a checkpoint that is also the target's, and copies of its embedding and head.
        failed = {each.source for each in found.traced.objections if self.is_apart or is_beside(each.source)}
        rest = {name: meta for name, meta in naming.tensors.items() if name in found.traced.taken | failed}
        if len(rest) == len(naming.tensors):
            return found
        again = trace_twin(twin, replace(naming, tensors=rest), **options)
        lost = tuple(each for each in found.traced.objections if each.parameter and not each.source)
        return replace(again, traced=again.traced.with_all([Traced(copies=(), objections=lost)]))

    def _refusal(self, reason: str) -> Refusal:
        return Refusal(module=type(self.network).__name__, reason=reason, remedy=self._remedy)


def inventory_of_draft(
    draft: DraftModel, twin: Twin | Refusal, rules: KernelRules, network: nn.Module, target: Inventory
) -> tuple[Inventory, dict[str, str]]:
    """What a refit writes of a draft alone; and what its checkpoint calls tensors that it has of the target, with their names
    there.

    Args:
        draft: The draft.
        twin: The trace of its loader, or why there is none.
        rules: What its engine's kernels do.
        network: The target.
        target: What a refit writes of it.
    """
    of_target = {slot.weight.untyped_storage()._cdata: slot.name for slot in target.slots}
    scales = {slot.scale.untyped_storage()._cdata for slot in target.slots if slot.scale is not None}
    rules, shared = _DraftRules(rules, of_target.keys() | scales), dict[str, str]()
    if isinstance(twin, Refusal):
        return inventory_of(draft.network, rules, twin), shared
    held = ((name, of_target.get(tensor.untyped_storage()._cdata)) for name, tensor in named_tensors(draft.network))
    names = {name: found for name, found in held if found is not None and name in twin.firsts}
    shared = {copy.source: names[copy.parameter] for copy in twin.traced.copies if copy.parameter in names}
    # Engines give back the buffers of the target alone after sleep.
    own = inventory_of(draft.network, rules, twin.without(names), has_noise=True, apart=(network,))
    stored = {} if draft.is_plain else draft.stored  # the trace has found the files of any other
    skipped = stored.keys() - twin.naming.tensors.keys() if draft.is_apart else frozenset[str]()
    never_sent = [name for name, m in stored.items() if m.dtype in TABLES or is_kv_scale(name) or name in skipped]
    own = replace(own, unneeded=(*own.unneeded, *never_sent), refusals=(*own.refusals, *draft.refusals))
    if draft.is_apart:
        return named_apart(own, DRAFT), {DRAFT + name: first for name, first in shared.items()}
    return own, {name: first for name, first in shared.items() if name != first}


class _DraftRules:
    """An engine's rules for a draft, which leaves the target's weights to the target, and may hold all of its own as its
    checkpoint does.
    """

    to_quantize: str | None = None

    def __init__(self, rules: KernelRules, storages: Collection[int]) -> None:
        self._rules, self._storages = rules, storages
        self.other_quantization, self.absorbed = rules.other_quantization, rules.absorbed
        self.why_refused, self.kernel_of, self.swaps_halves = rules.why_refused, rules.kernel_of, rules.swaps_halves
        self.dequantize, self.refreshes = rules.dequantize, rules.refreshes

    def kept(self, module: nn.Module) -> Collection[str]:
        """Also tables of token ids."""
        own = ((key, held) for key, held in module._parameters.items() if held is not None)
        others = [key for key, held in own if held.dtype in TABLES or held.untyped_storage()._cdata in self._storages]
        return [*self._rules.kept(module), *others]
