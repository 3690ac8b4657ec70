"""SGLang in the refit benchmark, beside SGLang's own way to update weights."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8refit.bench.eager import eager_checkpoint
from fp8refit.bench.engine import Place, RefitBoot, Strategy
from fp8refit.bench.policies import in_buckets
from fp8refit.bench.server import BenchServer
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.layout import EngineLayout
from fp8refit_sglang.compat import VERSIONS

_BUCKETS = {"512mib": ("512 MiB", 512 << 20), "2gib": ("2 GiB", 2 << 30)}
"""A bucket size that RL frameworks use, and a larger one."""
_OWN = "fp8", "w8a8_fp8"
"""How SGLang quantizes BF16 weights itself."""


class SglangBench:
    """Implements `fp8refit.bench.engine.BenchEngine`, with schedulers in other processes."""

    worker = None

    def __init__(self, wanted: RefitBoot) -> None:
        import sglang

        self.settings = {name.replace("-", "_"): value for name, value in _settings(wanted).items()}
        self.candidate = sglang.Engine(**self.settings)
        try:
            with Refitter(self.candidate) as refitter:
                self._layout: EngineLayout = refitter.layout()
        except BaseException:
            self.close()
            raise
        self.strategies: Sequence[Strategy] = tuple(
            Strategy(
                name=f"update_weights_from_tensor-{label}",
                summary=f"quantize each weight in eager PyTorch, flatten them into buckets of {size}, hand each over by its "
                "CUDA IPC handle (`load_format='flattened_bucket'`), and flush",
                update=partial(self._update, bucket_bytes=num_bytes),
            )
            for label, (size, num_bytes) in (_BUCKETS.items() if wanted.quantization is None else ())
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


def _settings(wanted: RefitBoot) -> dict[str, object]:
    """The engine's arguments, as on the command line of its server."""
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")  # it takes minutes, and little is generated
    is_served = wanted.place is Place.SERVER
    settings: dict[str, object] = {
        "model-path": str(wanted.model),
        "load-format": "dummy",
        **(
            {"quantization": wanted.quantization}
            if wanted.is_online
            else {"json-model-override-args": json.dumps({"quantization_config": wanted.checkpoint})}
        ),
        "tp-size": wanted.tp,
        "skip-tokenizer-init": True,
        "context-length": 512 if is_served else 2048,
        "max-running-requests": 32 if is_served else 8,
        "max-total-tokens": 16384,
        "disable-cuda-graph": True,
    }
    if not torch.cuda.is_available():
        settings |= {"device": "cpu", "dtype": "bfloat16", "max-total-tokens": 2048}
    return settings


def _complete(post: Callable[[str, object], Any], prompt: Sequence[int], num_tokens: int) -> bool:
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    answer = post("/generate", {"input_ids": list(prompt), "sampling_params": sampling})
    return bool(len(answer["output_ids"]) == num_tokens)


def boot(wanted: RefitBoot) -> SglangBench | BenchServer:
    """Boot an engine with random weights.

    Raises:
        UnsupportedEngineError: SGLang is not installed, does not run in this process, or does not quantize BF16 weights so.
    """
    if wanted.quantization not in (None, *_OWN):
        raise UnsupportedEngineError(
            f"sglang quantizes BF16 weights itself as {' or '.join(_OWN)}; pass one with --quantization, or leave out --online"
        )
    if wanted.place is Place.INSIDE:
        raise UnsupportedEngineError("SGLang runs in other processes; leave out --place, or pass outside or server")
    with VERSIONS.importing():
        if wanted.place is Place.SERVER:
            return BenchServer("sglang.launch_server", _settings(wanted), _complete)
        return SglangBench(wanted)
