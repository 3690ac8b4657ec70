"""A digest of the weights that one rank holds, computed where they lie: what a comparison of two engines needs to carry."""

import hashlib
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from fp8refit.live import LiveTensor
from fp8refit.slots import Inventory, dtype_name

_CHUNK_WORDS = 1 << 24
"""Words of four bytes that are summed at a time: 64 MiB, and 128 MiB beside them."""
_WEIGHTS = 65521
"""Words that far apart count alike; a prime, so that no common stride is a multiple of it."""


@torch.inference_mode()
def fingerprint(inventory: Inventory) -> str:
    """A sha256 over name, dtype, shape and a checksum of every live tensor that a refit writes.

    Checksums are sums of four-byte words times their places, in 64-bit integers: they tell policies and broken refits apart,
    and are no protection against somebody who looks for two policies of one checksum. Reads every weight; one synchronisation.
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
    """Addresses of what slots are views of."""
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
