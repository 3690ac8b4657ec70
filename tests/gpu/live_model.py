"""Looks at one rank's live model from inside its process, without fp8refit. Counts CUDA graphs from the import on.

`state` is a model's `state_dict()`: every parameter and persistent buffer, by the engine's own name.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_replay = torch.cuda.CUDAGraph.replay
_replays = [0]


def _counted(graph: torch.cuda.CUDAGraph) -> None:
    _replays[0] += 1
    return _replay(graph)


torch.cuda.CUDAGraph.replay = _counted


def hash_bytes(state: dict[str, Tensor]) -> dict[str, str]:
    """A sha256 for each."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 4)) as pool:
        return dict(pool.map(_digest, sorted(state.items())))


def checksum(state: dict[str, Tensor]) -> int:
    """A number over all of them that any changed byte changes; milliseconds on a GPU."""
    total = 0
    for index, (_, tensor) in enumerate(sorted(state.items()), start=1):
        raw = tensor.detach().reshape(-1).view(torch.uint8)
        padded = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32)
        mixed = (padded.to(torch.int64) * (torch.arange(padded.numel(), device=padded.device) % 65521 + 1)).sum()
        total = (total * 1_000_003 + index * int(mixed)) % (1 << 61)
    return total


def places(state: dict[str, Tensor]) -> dict[str, int]:
    """Address of each."""
    return {name: tensor.data_ptr() for name, tensor in state.items()}


def num_replays() -> int:
    """CUDA graphs replayed so far in this process."""
    return _replays[0]


def memory() -> dict[str, int]:
    """Bytes: free on this GPU, the most that torch held since the last call, what it holds; open files."""
    found = {"free": 0, "peak": 0, "allocated": 0, "num_files": len(os.listdir("/proc/self/fd"))}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        found |= {
            "free": torch.cuda.mem_get_info()[0],
            "peak": torch.cuda.max_memory_allocated(),
            "allocated": torch.cuda.memory_allocated(),
        }
        torch.cuda.reset_peak_memory_stats()
    return found


def _digest(item: tuple[str, Tensor]) -> tuple[str, str]:
    name, tensor = item
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return name, hashlib.sha256(raw).hexdigest()
