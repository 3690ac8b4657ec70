"""Sets the KV scales of an engine: its ranks measure, agree on the result, and write it."""

import logging
import time
from collections.abc import Mapping
from itertools import chain

from fp8refit.config import KvOrder, RefitConfig
from fp8refit.ranks.agreement import Agreement
from fp8refit.ranks.kv.scales import report_of
from fp8refit.report import KvReport

logger = logging.getLogger(__name__)


def set_kv_scales(agreement: Agreement, order: KvOrder, config: RefitConfig) -> list[KvReport]:
    """Measure on every rank, or take the scales that `order` gives, and write them. Every rank must call it.

    Returns:
        Each rank's report, in rank order.

    Raises:
        RefitError: See `LiveModel.measure_kv` and `Target.write_kv`; or another rank's error.
    """
    start_s, num_passes, target = time.perf_counter(), 0, agreement.target
    scales: Mapping[str, float] = order.scales
    kept: tuple[str, ...] = ()
    if order.token_ids:
        error, measured = agreement.attempt(lambda: target.live.measure_kv(order, config))
        if error is not None:  # immediately: other ranks may wait for this one in the middle of the pass
            logger.error("a calibration pass failed on rank %d: %s", agreement.group.rank, error)
        ballots = agreement.vote("measured", error, config, amax=measured.amax if measured is not None else {})
        assert measured is not None, "every rank measured"
        seen = [ballot.amax for ballot in ballots] if config.kv.reduction == "max" else [measured.amax]
        amax = {name: max(one.get(name, 0.0) for one in seen) for name in dict.fromkeys(chain(*seen))}
        known = target.live.require_kv()
        scales, kept = known.scales_for(amax, config.kv), known.kept(amax, config.kv)
        num_passes = measured.num_passes
    error, written = agreement.attempt(lambda: target.write_kv(scales))
    seconds = time.perf_counter() - start_s
    report = report_of(order, written if written is not None else {}, kept=kept, num_passes=num_passes, seconds=seconds)
    return [ballot.kv for ballot in agreement.vote("scaled", error, config, kv=report) if ballot.kv is not None]
