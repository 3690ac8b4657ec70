"""What tests here make of what scenarios found."""

import statistics
from collections.abc import Iterator, Mapping, Sequence


def median(rows: Sequence[Mapping], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def over_roofline(rows: Sequence[Mapping], copy_gb_per_s: float) -> float:
    """The fill's time on the device over that of copying as many bytes."""
    return median(rows, "fill_device_s") * copy_gb_per_s * 1e9 / rows[0]["num_bytes"]


def comparison(refitted: Mapping, fresh: Mapping) -> dict:
    """Of what a refitted engine holds and says with what a freshly booted one does."""
    ours, theirs = refitted["generated"], fresh["generated"]
    found = {
        "live_bytes": refitted["live"] == fresh["live"],
        "tokens": ours["tokens"] == theirs["tokens"],
        "log_probabilities": ours == theirs,
    }
    if found["tokens"] and not found["log_probabilities"]:
        found["log_probabilities_apart"] = _apart(ours, theirs)
    return found


def _apart(ours: Mapping, theirs: Mapping) -> list[float]:
    """By how much log-probabilities differ, where they do."""
    return [abs(a - b) for a, b in zip(_numbers(ours), _numbers(theirs), strict=False) if a != b]


def _numbers(found: object) -> Iterator[float]:
    """Every number that is written in hexadecimal, in the order of tokens."""
    if isinstance(found, str):
        if "0x" in found:
            yield float.fromhex(found)
    elif isinstance(found, Mapping):
        for _, each in sorted(found.items()):
            yield from _numbers(each)
    elif isinstance(found, Sequence):
        for each in found:
            yield from _numbers(each)


def grown_bytes(steps: Sequence[Mapping]) -> int:
    """Of any rank, since it was warm."""
    return max(max(step["grown_bytes"], default=0) for step in steps)
