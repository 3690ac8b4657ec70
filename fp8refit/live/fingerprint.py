"""A digest of one rank's weights, computed on their device, so that two engines can be compared without moving
weights.
"""

import hashlib
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from fp8refit.live.parameters import LiveTensor
from fp8refit.live.slots import Inventory, dtype_name

_CHUNK_WORDS = 1 << 24
"""Four-byte words summed at a time: 64 MiB, plus 128 MiB of work space."""
_WEIGHTS = 65521
"""Words this far apart get the same factor. A prime, so that no common stride is a multiple of it."""


@torch.inference_mode()
def fingerprint(inventory: Inventory) -> str:
    """Return a SHA-256 over the name, dtype, shape and checksum of every live tensor that a refit writes.

    A checksum is the sum of four-byte words times their positions, in 64-bit integers. It tells policies and broken
    refits apart, but does not resist somebody who constructs a collision. Reads every weight and synchronizes once.
    """
    written = _storages(inventory)
    live = [entry for entry in inventory.live if entry.tensor.untyped_storage().data_ptr() in written]
    if not live:
        return hashlib.sha256().hexdigest()
    sums = torch.stack([_checksum(entry.tensor) for entry in live]).tolist()
    digest = hashlib.sha256()
    for entry, value in sorted(zip(live, sums, strict=True), key=lambda pair: pair[0].name):
        digest.update(f"{_title(entry)}|{value}\n".encode())
    return digest.hexdigest()


def _storages(inventory: Inventory) -> set[int]:
    """Addresses of the storages that slots are views of."""
    slots = [slot for slot in inventory.slots if not slot.is_optional]
    tensors = chain((slot.weight for slot in slots), (slot.scale for slot in slots if slot.scale is not None))
    written = (tensor for refresh in inventory.refreshes for tensor in refresh.written)
    return {tensor.untyped_storage().data_ptr() for tensor in chain(tensors, written)}


def _title(entry: LiveTensor) -> str:
    return f"{entry.name}|{dtype_name(entry.tensor.dtype)}|{list(entry.tensor.shape)}"


def _checksum(tensor: Tensor) -> Tensor:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    odd = raw.numel() % 4
    words, rest = raw[: raw.numel() - odd], raw[raw.numel() - odd :]
    total = rest.to(torch.int64).sum()
    for start, chunk in _chunks(words.view(torch.int32)):
        places = (torch.arange(chunk.numel(), device=chunk.device) + start) % _WEIGHTS + 1
        total = total * 31 + (chunk.to(torch.int64) * places).sum()
    return total


def _chunks(words: Tensor) -> Iterable[tuple[int, Tensor]]:
    for start in range(0, words.numel(), _CHUNK_WORDS):
        yield start, words[start : start + _CHUNK_WORDS]
