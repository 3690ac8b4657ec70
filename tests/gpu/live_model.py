"""Looks at one rank's live model from inside its process, without fp8refit. Counts CUDA graphs from the import on.

`state` is a model's `state_dict()`: every parameter and persistent buffer, by the engine's own name. If asked, it also
tells what fp8refit makes of the model.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from harness import free_bytes
from safetensors import safe_open
from torch import Tensor

_replay = torch.cuda.CUDAGraph.replay
_replays = [0]


def _counted(graph: torch.cuda.CUDAGraph) -> None:
    _replays[0] += 1
    return _replay(graph)


torch.cuda.CUDAGraph.replay = _counted


def look(what: str, state: dict[str, Tensor]) -> Any:
    """What every engine can be asked."""
    looks = {
        "live_bytes": lambda: hash_bytes(state),
        "checksum": lambda: checksum(state),
        "places": lambda: {name: tensor.data_ptr() for name, tensor in state.items()},
        "replays": lambda: _replays[0],
        "memory": memory,
    }
    return looks[what]()


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


def memory() -> dict[str, int]:
    """Bytes that are free on this GPU, and how many files are open."""
    return {"free": free_bytes(), "num_files": len(os.listdir("/proc/self/fd"))}


class Observer:
    """What `collective_rpc` reaches on every rank of vLLM's: `worker_extension_cls="live_model.Observer"`."""

    def observe_rank(self, what: str) -> Any:
        model = self.model_runner.get_model()
        own = {
            "kv_scales": lambda: self._observed_scales(model),
            "loader": lambda: self._observed_loader(model),
            "held": lambda: self._observed_holdings(model),
        }
        return own[what]() if what in own else look(what, model.state_dict())

    def observe_reload(self, folder: str) -> None:
        """vLLM's own reload, from the files of a checkpoint: an engine of noise does not take their path."""
        self.reload_weights(weights_iterator=_read(Path(folder)))

    def _observed_scales(self, model) -> dict[str, float]:
        """Every copy of every scale of the KV cache."""
        return {
            f"{name}.{key}": float(value)
            for name, module in model.named_modules()
            if hasattr(module, "_k_scale_float")
            for key, value in (vars(module) | module._buffers).items()
            if key.startswith(("_q_scale", "_k_scale", "_v_scale")) and value is not None
        }

    def _observed_loader(self, model) -> dict:
        from fp8refit_vllm.layout import VllmRules
        from fp8refit_vllm.twin import twin_of
        from model_costs import cost_of_tracing

        from fp8refit.tracing.inventory import inventory_of

        return cost_of_tracing(
            model,
            lambda: twin_of(self.vllm_config),
            lambda model, twin: inventory_of(model, VllmRules(), twin),
        )

    def _observed_holdings(self, model) -> dict:
        from fp8refit_vllm.twin import _apart, _built
        from model_costs import holdings
        from vllm.config import set_current_vllm_config

        from fp8refit.tracing.twin import EmptyOnMeta

        config = _apart(self.vllm_config)
        with set_current_vllm_config(config):
            return holdings(model, lambda: _built(config, EmptyOnMeta()))


def _read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a handle, not a mapping
                yield name, tensors.get_tensor(name)


def _digest(item: tuple[str, Tensor]) -> tuple[str, str]:
    name, tensor = item
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return name, hashlib.sha256(raw).hexdigest()
