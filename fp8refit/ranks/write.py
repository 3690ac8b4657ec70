"""One write into a live model, from the first byte until the device's flags are read."""

import time
from collections.abc import Iterable

import torch

from fp8refit.errors import InvalidSourceError, UnsupportedEngineError
from fp8refit.fill.fill import Arriving
from fp8refit.fill.fills import Prepared
from fp8refit.fill.plan import RefitPlan
from fp8refit.fill.ties import tie_problem
from fp8refit.live.slots import Inventory, num_elements
from fp8refit.ranks.live_model import LiveModel, assert_in_place
from fp8refit.report import KvReport, RankReport


class Write:
    """Writes what was prepared, or compares it with the slots. Nothing happens before `begin`.

    Args:
        prepared: The prepared source.
        live: The live model.
    """

    def __init__(self, prepared: Prepared, live: LiveModel) -> None:
        self.prepared = prepared
        self._live = live
        self._start_s = time.perf_counter()
        self._events = _timing_events(live.device)

    def begin(self) -> None:
        """Launch what needs no staging."""
        begun = self._events[0] if self._events is not None else None
        for fill in self.prepared.fills:
            fill.launch(begun)
            begun = None

    def read(self, *, drain: bool) -> None:
        """Read the source. See `Fill.read`."""
        for fill in self.prepared.fills:
            fill.read(drain=drain)

    def take(self, tensors: Iterable[Arriving], *, drain: bool) -> None:
        """Write a part of a pushed source. See `Fill.take`."""
        self.prepared.fills[-1].take(tensors, drain=drain)

    def flush(self) -> None:
        """Write what has been taken so far."""
        for fill in self.prepared.fills:
            fill.flush()

    def came(self) -> set[str]:
        """Names of the slots whose tensors have arrived in a stream so far."""
        aliases = self.prepared.inventory.aliases
        return {aliases.get(name, name) for name in self.prepared.fills[-1].came}

    def finish(self) -> RankReport:
        """Complete the write, wait for the device, and read its flags.

        Raises:
            InvalidSourceError: A stream was not as announced; or, unannounced, does not fit or is incomplete.
            NonFiniteError: NaN or Inf; names the tensors.
            LiveTensorMovedError: The engine replaced a live tensor in the meantime.
            UnsupportedEngineError: It made copies of weights in the meantime.
        """
        prepared, writes = self.prepared, self.prepared.writes
        for fill in prepared.fills:
            fill.finish()
        if writes:
            self._complete(prepared.inventory)
        if self._events is not None:
            self._events[1].record()
        assert_in_place(prepared.inventory)  # while the device is busy, as is the next
        if writes and (copies := self._live.refusals(prepared.inventory)):
            raise UnsupportedEngineError(
                "the engine made copies of weights while it was refitted, and is dirty:", list(map(str, copies))
            )
        if self._events is not None:
            self._events[1].synchronize()
        filled_s = time.perf_counter()
        bad, differing, changed = prepared.read_flags()
        if bad:
            raise prepared.error_of(bad, written=writes)
        if writes and differing:
            raise InvalidSourceError(list(map(tie_problem, sorted(differing))))
        plan, source_scales = prepared.plan, self._live.source_scales
        assert plan is not None, "a fill that is complete has a plan"
        kv = source_scales.write(plan) if writes and source_scales is not None else None
        report = self._report(plan, filled_s, differing=tuple(sorted(differing)), kv=kv)
        if not (writes and prepared.config.count_changes):
            return report
        written = num_elements(prepared.inventory.slots[index] for index in {step.slot for step in plan.steps})
        counts = {
            kind: (num, of) for kind, num, of in zip(("codes", "scales", "values"), changed, written, strict=True) if of
        }
        return report.model_copy(update={"changed": counts})

    def _complete(self, inventory: Inventory) -> None:
        """Write what no source sends: padding, tensors derived from weights, and KV scales of a failed attempt."""
        with torch.inference_mode():
            for padding in inventory.padding:
                padding.zero_()
            for refresh in inventory.refreshes:
                if not (refresh.is_constant and self._live.has_constants):
                    refresh.run()
        if self._live.kv is not None and self._live.kv.torn is not None:
            self._live.kv.heal()

    def _report(
        self, plan: RefitPlan, filled_s: float, *, differing: tuple[str, ...], kv: KvReport | None
    ) -> RankReport:
        fills = self.prepared.fills
        return RankReport(
            device=str(self._live.device),
            num_tensors=plan.num_sources,
            num_quantized=plan.num_quantized,
            ignored=plan.ignored,
            kept=plan.kept,
            bytes_read=plan.num_bytes_read,
            bytes_written=plan.num_bytes_written,
            fill_s=filled_s - self._start_s,
            verify_s=time.perf_counter() - filled_s,
            fill_device_s=self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events is not None else None,
            extra_bytes=sum(fill.num_device_bytes for fill in fills),
            is_first=any(fill.is_first for fill in fills),
            source_digest=plan.source_digest,
            kv=kv,
            differing=differing,
        )


def _timing_events(device: torch.device) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
