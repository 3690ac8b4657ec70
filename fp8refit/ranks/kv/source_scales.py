"""KV scales sent with the weights, under checkpoint names (`model.layers.0.self_attn.k_scale`)."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch

from fp8refit.fill.plan import RefitPlan, Step
from fp8refit.live.names import kv_scale_names
from fp8refit.live.slots import Inventory, Slot
from fp8refit.ranks.kv.calibration import unfit_scales
from fp8refit.ranks.kv.scales import KINDS, KvScales, refuse_unfit, report_of
from fp8refit.report import KvReport
from fp8refit.sources.source import PushedSource, RandomAccess, Source


class SourceScales:
    """Receives KV scales in separate memory, so that they are checked before they are written.

    Args:
        scales: The engine's scales.
        inventory: The live model's inventory, with a KV cache.
        device: The scales' device.

    Attributes:
        inventory: The inventory with one more slot per scale, after those of the weights.
    """

    def __init__(self, scales: KvScales, inventory: Inventory, device: torch.device) -> None:
        self._scales = scales
        self._num_weights = len(inventory.slots)
        self._arrivals = torch.ones(len(scales.names), dtype=torch.float32, device=device)
        self.inventory = self._extend(inventory)

    def check(self, source: Source, plan: RefitPlan | None) -> None:
        """Check the scales in a source before anything is written, as far as they can be read.

        Raises:
            InvalidSourceError: A scale is not finite and positive.
            UnsupportedEngineError: The scales of this engine cannot be changed.
            EngineAsleepError: They cannot be changed now.
        """
        names = [step.source for step in self.steps(plan)] if plan is not None else []
        if not names and self._scales.torn is None:
            return
        self._scales.check_writable()
        if isinstance(source, RandomAccess):
            refuse_unfit(unfit_scales({name: float(scale) for name, scale in source.pick(names).items()}))
        elif isinstance(source, PushedSource):
            refuse_unfit((name, source.unfit[name]) for name in names if name in source.unfit)

    def write(self, plan: RefitPlan) -> KvReport | None:
        """Write the scales that have arrived, if any.

        Raises:
            InvalidSourceError: A scale is not finite and positive.
        """
        steps = self.steps(plan)
        if not steps:
            return None
        start_s = time.perf_counter()
        self._scales.check_writable()
        scales = self._scales.write(self.arrived(steps))
        return report_of(None, scales, seconds=time.perf_counter() - start_s)

    def steps(self, plan: RefitPlan) -> list[Step]:
        """The steps of a plan that write scales: the last ones, since plans are in slot order."""
        return list(takewhile(lambda step: step.slot >= self._num_weights, reversed(plan.steps)))

    def arrived(self, steps: Sequence[Step]) -> dict[str, float]:
        """The scales written by at least one step, by our names.

        Raises:
            InvalidSourceError: A scale is not finite and positive.
        """
        names = self._scales.names
        found = {names[step.slot - self._num_weights]: step.source for step in steps}
        values = dict(zip(names, self._arrivals.tolist(), strict=True))
        scales = {name: values[name] for name in found}
        refuse_unfit(((found[name], why) for name, why in unfit_scales(scales)), written=True)
        return scales

    def _extend(self, inventory: Inventory) -> Inventory:
        names = self._scales.names
        aliases, unneeded = dict(inventory.aliases), list(inventory.unneeded)
        for layer in inventory.kv.layers if inventory.kv is not None else ():
            for kind in KINDS:
                name, *others = kv_scale_names(layer.name, kind)
                if name in names:
                    aliases.update(dict.fromkeys(others, name))
                else:
                    unneeded += [name, *others]
            unneeded += kv_scale_names(layer.name, "prob")
        slots = [
            Slot(name=name, full_shape=(1,), weight=self._arrivals[index : index + 1], is_optional=True)
            for index, name in enumerate(names)
        ]
        return replace(inventory, slots=(*inventory.slots, *slots), aliases=aliases, unneeded=tuple(unneeded))
