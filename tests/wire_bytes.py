"""How many bytes a broadcast takes."""

from fp8refit.remote.broadcast.sender import Sender


def num_bytes_sent(sender: Sender) -> int:
    """Bytes that the trainer sends: what goes to all, plus what goes to each section."""
    return sum(bucket.num_bytes for bucket in sender.buckets)


def num_bytes_to(sender: Sender, section: int | None) -> int:
    """Bytes that a rank of a section receives, or any rank if there are no sections."""
    portions = (0,) if section is None else (0, 1 + section)
    return sum(bucket.portion_bytes[portion] for bucket in sender.buckets for portion in portions)
