"""The first bytes of every bucket: a marker, its number, and whether the policy continues."""

import struct
from enum import IntEnum

import torch
from torch import Tensor

from fp8refit.errors import TransportError
from fp8refit.transport.collective.buckets import HEADER_BYTES

_MAGIC = 0x38706672656669_74
_FIELDS = struct.Struct("<QII")


class Status(IntEnum):
    """What a bucket holds."""

    WEIGHTS = 1
    NOTHING = 2
    """The trainer failed, left the reason in the store, and sends no more weights."""


class Headers:
    """The headers of all buckets of a policy, on the buckets' device, so that copying them does not wait for the host.

    Args:
        num_buckets: Number of buckets.
        device: Device of the buckets.
    """

    def __init__(self, num_buckets: int, device: torch.device) -> None:
        packed = [_pack(ordinal, status) for status in Status for ordinal in range(num_buckets)]
        every = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8) if packed else torch.empty(0)
        self._of_status = every.view(len(Status), num_buckets, HEADER_BYTES).to(device)

    @torch.inference_mode()
    def write(self, bucket: Tensor, ordinal: int, status: Status) -> None:
        """Write the header of `bucket`, (N,) uint8, on the current stream."""
        bucket[:HEADER_BYTES].copy_(self._of_status[list(Status).index(status), ordinal])


def _pack(ordinal: int, status: Status) -> bytes:
    return _FIELDS.pack(_MAGIC, ordinal, status).ljust(HEADER_BYTES, b"\0")


def read_header(bucket: Tensor, ordinal: int) -> Status:
    """Return the status of a received bucket.

    Raises:
        TransportError: It is not bucket number `ordinal`.
    """
    magic, found, status = _FIELDS.unpack_from(bucket[: _FIELDS.size].cpu().numpy().tobytes())
    if magic != _MAGIC or found != ordinal or status not in (Status.WEIGHTS, Status.NOTHING):
        raise TransportError(
            f"bucket {ordinal} of the broadcast did not arrive: trainer and engine are out of step; refit again"
        )
    return Status(status)
