"""What tests here make of what scenarios found."""

import statistics
from collections.abc import Mapping, Sequence


def median(rows: Sequence[Mapping], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def phases_ms(rows: Sequence[Mapping]) -> dict[str, float]:
    return {phase: 1e3 * median([row["phases_s"] for row in rows], phase) for phase in rows[0]["phases_s"]}


def over_roofline(rows: Sequence[Mapping], copy_gb_per_s: float) -> float:
    """The fill's time on the device over that of copying as many bytes."""
    return median(rows, "fill_device_s") * copy_gb_per_s * 1e9 / rows[0]["num_bytes"]


def plan_fill_verify_s(rows: Sequence[Mapping]) -> float:
    return statistics.median(sum(row["phases_s"][phase] for phase in ("plan", "fill", "verify")) for row in rows)


def comparison(refitted: Mapping, fresh: Mapping) -> dict:
    """Of what a refitted engine holds and says with what a freshly booted one does."""
    return {
        "live_bytes": refitted["live"] == fresh["live"],
        "tokens": refitted["generated"]["tokens"] == fresh["generated"]["tokens"],
        "log_probabilities": refitted["generated"] == fresh["generated"],
    }


def grown_bytes(steps: Sequence[Mapping]) -> int:
    """Of any rank, since it was warm."""
    return max(max(step["grown_bytes"], default=0) for step in steps)
