"""Looks at one rank's live model inside its vLLM worker, without fp8refit: `worker_extension_cls="observer.Observer"`."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import torch

_replay = torch.cuda.CUDAGraph.replay
_replays = [0]


def _counted(graph: torch.cuda.CUDAGraph) -> None:
    _replays[0] += 1
    return _replay(graph)


torch.cuda.CUDAGraph.replay = _counted


class Observer:
    """Methods that `collective_rpc` reaches on every rank."""

    def observe_live_bytes(self) -> dict[str, str]:
        """A sha256 for each parameter and persistent buffer, by the engine's own name."""
        with ThreadPoolExecutor(4) as pool:
            return dict(pool.map(_digest, sorted(self._observed_state().items())))

    def observe_checksum(self) -> int:
        """A number over all of them that any changed byte changes; milliseconds on a GPU."""
        total = 0
        for index, (_, tensor) in enumerate(sorted(self._observed_state().items()), start=1):
            raw = tensor.detach().reshape(-1).view(torch.uint8)
            padded = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32)
            mixed = (padded.to(torch.int64) * (torch.arange(padded.numel(), device=padded.device) % 65521 + 1)).sum()
            total = (total * 1_000_003 + index * int(mixed)) % (1 << 61)
        return total

    def observe_places(self) -> dict[str, int]:
        """Address of each."""
        return {name: tensor.data_ptr() for name, tensor in self._observed_state().items()}

    def observe_replays(self) -> int:
        """CUDA graphs replayed so far in this process."""
        return _replays[0]

    def observe_memory(self) -> dict[str, int]:
        """Bytes: free on this GPU, the most that torch held since the last call, what it holds; host memory; open files."""
        torch.cuda.synchronize()
        found = {
            "free": torch.cuda.mem_get_info()[0],
            "peak": torch.cuda.max_memory_allocated(),
            "allocated": torch.cuda.memory_allocated(),
            "num_files": len(os.listdir("/proc/self/fd")),
        }
        torch.cuda.reset_peak_memory_stats()
        return found

    def _observed_state(self) -> dict[str, torch.Tensor]:
        return self.model_runner.get_model().state_dict()


def _digest(item: tuple[str, torch.Tensor]) -> tuple[str, str]:
    name, tensor = item
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return name, hashlib.sha256(raw).hexdigest()
