"""Memory for tensors that are kept for some buckets of a broadcast, and then make room for others."""

from collections.abc import Mapping

_ALIGNMENT_BYTES = 256


def place_spans(spans: Mapping[str, tuple[int, int]], num_bytes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Give each tensor a place that no other has at the same time.

    Args:
        spans: The first and the last bucket for which each is kept.
        num_bytes: Its size.

    Returns:
        Where each begins, in bytes, and how much memory all of them take.
    """
    starts: dict[str, int] = {}
    total = 0
    for name in sorted(spans, key=lambda name: spans[name]):
        first, _ = spans[name]
        taken = sorted(
            (starts[each], starts[each] + _aligned(num_bytes[each])) for each in starts if spans[each][1] >= first
        )
        start = 0
        for low, high in taken:
            if low - start >= num_bytes[name]:
                break
            start = max(start, high)
        starts[name] = start
        total = max(total, start + _aligned(num_bytes[name]))
    return starts, total


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
