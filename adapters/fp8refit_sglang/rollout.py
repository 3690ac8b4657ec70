"""SGLang in the benchmark of rollouts, as it is booted for one: with CUDA graphs."""

import json
from collections.abc import Sequence
from pathlib import Path

from fp8refit.bench.rollout import Precision
from fp8refit.errors import UnsupportedEngineError
from fp8refit_sglang.engine import BLOCK_FP8


class SglangRollout:
    """See `fp8refit.bench.rollout.RolloutEngine`."""

    def __init__(self, model: Path, *, tp: int, precision: Precision, max_length: int, max_batch: int) -> None:
        import sglang

        is_fp8 = precision is not Precision.BF16
        self.settings: dict[str, object] = {
            "load_format": "dummy",
            "json_model_override_args": json.dumps(BLOCK_FP8 if is_fp8 else {}),
            "tp_size": tp,
            "skip_tokenizer_init": True,
            "context_length": max_length,
            "max_running_requests": max_batch,
            "kv_cache_dtype": "fp8_e4m3" if precision is Precision.FP8_KV else "auto",
        }
        if is_fp8:
            self.settings["mem_fraction_static"] = 0.45  # a trainer's policy lies beside it while it is refitted
        self.candidate = sglang.Engine(model_path=str(model), **self.settings)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """See `fp8refit.bench.rollout.RolloutEngine`."""
        sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
        self.candidate.generate(input_ids=[list(ids) for ids in prompts], sampling_params=sampling)

    def close(self) -> None:
        """See `fp8refit.bench.rollout.RolloutEngine`."""
        self.candidate.shutdown()


def boot(model: Path, *, tp: int, precision: Precision, max_length: int, max_batch: int) -> SglangRollout:
    """An engine of noise.

    Raises:
        UnsupportedEngineError: SGLang is not installed.
    """
    try:
        return SglangRollout(model, tp=tp, precision=precision, max_length=max_length, max_batch=max_batch)
    except ImportError as error:
        raise UnsupportedEngineError(f"SGLang is not installed ({error}); pip install 'fp8refit[sglang]'") from error
