"""A digest of one rank's weights, computed on their device, so that two engines can be compared without moving
weights.
"""

import hashlib
from itertools import chain

import torch
from torch import Tensor

from fp8refit.live.parameters import LiveTensor
from fp8refit.live.slots import Inventory, dtype_name

_COLUMNS = 1 << 12
_WEIGHTS = 65521
"""Sums this far apart get the same factor. A prime, so that no common stride is a multiple of it."""


@torch.inference_mode()
def fingerprint(inventory: Inventory) -> str:
    """Return a SHA-256 over the name, dtype, shape and checksum of every live tensor that a refit writes.

    Reads every weight twice and synchronizes once.
    """
    written = _storages(inventory)
    live = [entry for entry in inventory.live if entry.tensor.untyped_storage().data_ptr() in written]
    if not live:
        return hashlib.sha256().hexdigest()
    sums = torch.stack([checksum(entry.tensor) for entry in live]).tolist()
    digest = hashlib.sha256()
    for entry, value in sorted(zip(live, sums, strict=True), key=lambda pair: pair[0].name):
        digest.update(f"{_title(entry)}|{value}\n".encode())
    return digest.hexdigest()


def _storages(inventory: Inventory) -> set[int]:
    """Addresses of the storages that slots are views of."""
    slots = [slot for slot in inventory.slots if not slot.is_optional]
    tensors = (each for slot in slots for each in (slot.weight, slot.scale, slot.global_scale) if each is not None)
    written = (tensor for refresh in inventory.refreshes for tensor in refresh.written)
    return {tensor.untyped_storage().data_ptr() for tensor in chain(tensors, written)}


def _title(entry: LiveTensor) -> str:
    return f"{entry.name}|{dtype_name(entry.tensor.dtype)}|{list(entry.tensor.shape)}"


def checksum(tensor: Tensor) -> Tensor:
    """Return a 64-bit integer on the tensor's device. Reads it twice, on a GPU at the speed of its memory.

    Four-byte words are put into a matrix; its row sums and column sums count times their positions. That tells policies
    and broken refits apart, but does not resist somebody who constructs a collision.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % 4:
        raw = raw.clone()
    odd = raw.numel() % (4 * _COLUMNS)
    words, rest = raw[: raw.numel() - odd].view(torch.int32).view(-1, _COLUMNS), raw[raw.numel() - odd :]
    columns, rows = (words.sum(dim, dtype=torch.int64) for dim in (0, 1))
    return (_weighed(columns) * 31 + _weighed(rows)) * 31 + _weighed(rest.to(torch.int64))


def _weighed(sums: Tensor) -> Tensor:
    return (sums * (torch.arange(sums.numel(), device=sums.device) % _WEIGHTS + 1)).sum()
