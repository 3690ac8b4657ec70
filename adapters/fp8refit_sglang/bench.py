"""SGLang in the refit benchmark, beside SGLang's own way to update weights."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8refit.bench.eager import eager_checkpoint
from fp8refit.bench.engine import Strategy
from fp8refit.bench.policies import in_buckets
from fp8refit.bench.shapes import block_fp8
from fp8refit.driver.refitter import Refitter
from fp8refit.live.layout import EngineLayout
from fp8refit_sglang.compat import VERSIONS

_BUCKETS_BYTES = {"512 MiB": 512 << 20, "2 GiB": 2 << 30}
"""A bucket size that RL frameworks use, and a larger one."""


class SglangBench:
    """Implements `fp8refit.bench.engine.BenchEngine`, with schedulers in other processes.

    Args:
        model: Folder with a `config.json`.
        tp: Tensor-parallel ranks.
    """

    def __init__(self, model: Path, *, tp: int) -> None:
        os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")  # it takes minutes, and nothing is generated
        import sglang

        self.settings: dict[str, object] = {
            "load_format": "dummy",
            "json_model_override_args": json.dumps({"quantization_config": block_fp8(model)}),
            "tp_size": tp,
            "skip_tokenizer_init": True,
            "context_length": 2048,
            "max_running_requests": 8,
            "max_total_tokens": 16384,
            "disable_cuda_graph": True,
        }
        if not torch.cuda.is_available():
            self.settings |= {"device": "cpu", "dtype": "bfloat16", "max_total_tokens": 2048}
        self.candidate = sglang.Engine(model_path=str(model), **self.settings)
        self._layout: EngineLayout = Refitter(self.candidate).layout()
        self.strategies: Sequence[Strategy] = tuple(
            Strategy(
                name=f"update_weights_from_tensor, {label} buckets",
                summary=f"quantize each weight in eager PyTorch, flatten them into buckets of {label}, hand each over by its "
                "CUDA IPC handle (`load_format='flattened_bucket'`), and flush",
                update=partial(self._update, bucket_bytes=num_bytes),
            )
            for label, num_bytes in _BUCKETS_BYTES.items()
        )

    def close(self) -> None:
        """Stop the engine and everything it started."""
        self.candidate.shutdown()

    def _update(self, policy: Mapping[str, Tensor], bucket_bytes: int) -> None:
        update_in_buckets(self.candidate, eager_checkpoint(self._layout, policy), bucket_bytes)


def update_in_buckets(engine: Any, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> None:
    """Load tensors by an `sglang.Engine`'s own update, in flat buckets that its ranks map."""
    if torch.cuda.is_available():
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    has_sessions = hasattr(engine, "begin_weight_update")  # 0.5.17 has none
    if has_sessions:
        _check(engine.begin_weight_update())
    for bucket in in_buckets(tensors, bucket_bytes):
        _send(engine, bucket)
    if has_sessions:
        _check(engine.end_weight_update())
    _check(engine.flush_cache())
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()


def _send(engine: Any, bucket: list[tuple[str, Tensor]]) -> None:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(named_tensors=bucket)
    payload = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    serialized = [MultiprocessingSerializer.serialize(payload) for _ in range(engine.server_args.tp_size)]
    _check(engine.update_weights_from_tensor(serialized, load_format="flattened_bucket", flush_cache=False))


def _check(answer: Any) -> None:
    """Raise if an update failed. SGLang returns (success, message), an object with both, or None."""
    success = answer[0] if isinstance(answer, tuple) else getattr(answer, "success", True)
    if not success:
        raise AssertionError(f"SGLang refused an update in a benchmark: {answer}")


def boot(model: Path, *, tp: int) -> SglangBench:
    """Boot an engine with random weights.

    Raises:
        UnsupportedEngineError: SGLang is not installed.
    """
    with VERSIONS.importing():
        return SglangBench(model, tp=tp)
