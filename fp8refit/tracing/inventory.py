"""Puts together what a refit of a traced model writes: its slots, and what the engine derives from them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from fp8refit.live.copies import Copies
from fp8refit.live.latent import Absorbed, with_absorbed
from fp8refit.live.parameters import live_tensors
from fp8refit.live.slots import Inventory, Refusal
from fp8refit.tracing.moved import with_experts
from fp8refit.tracing.proof import with_proof
from fp8refit.tracing.reading import read_inventory
from fp8refit.tracing.rules import KernelRules
from fp8refit.tracing.twin import Twin, refreshes_of_constants


def inventory_of(
    model: nn.Module,
    rules: KernelRules,
    traced: Twin | Refusal,
    *,
    has_noise: bool = False,
    apart: Collection[nn.Module] = (),
    experts: Mapping[nn.Module, Sequence[int]] = MappingProxyType({}),
) -> Inventory:
    """List everything that a refit of `model` writes, and everything that cannot be refitted.

    Args:
        model: The live model.
        rules: What its engine's kernels do.
        traced: The trace of the model's loader, or why it could not be traced.
        has_noise: Whether the engine was booted with dummy weights.
        apart: Other models of the engine, which have an inventory of their own.
        experts: Layers whose experts may have moved since they were loaded, and the number of the expert in each row.
    """
    if isinstance(traced, Refusal):
        return Inventory(slots=(), live=live_tensors(model), refusals=(traced,))
    inventory = with_proof(read_inventory(model, rules, with_experts(traced, model, experts)), model, rules, traced)
    inventory = with_absorbed(inventory, _absorbed(model, rules))
    constants = refreshes_of_constants(model, traced, rules.kept) if has_noise else ()
    inventory = replace(inventory, refreshes=(*inventory.refreshes, *rules.refreshes(model), *constants))
    copies = Copies(model, inventory, built=traced.values, kept=rules.kept, apart=apart)
    return replace(inventory, find_copies=copies.refusals)


def _absorbed(model: nn.Module, rules: KernelRules) -> Iterator[Absorbed]:
    """The copies of `kv_b_proj` that latent attention layers keep, except refused layers."""
    keys, values = rules.absorbed
    for name, module in model.named_modules():
        if hasattr(module, keys) and rules.why_refused(module) is None:
            projection: Any = getattr(module.kv_b_proj, "base_layer", module.kv_b_proj)  # under a LoRA wrapper
            yield Absorbed(
                name=name,
                owner=module,
                keys=keys,
                values=values,
                source=projection.weight,
                dequantized=partial(rules.dequantize, projection),
            )
