"""SGLang in the rollout benchmark, with its usual settings: with CUDA graphs."""

import json
from collections.abc import Sequence

import torch

from fp8refit.bench import policies
from fp8refit.bench.rollout_engine import MEMORY_SHARE, Precision, RolloutBoot
from fp8refit.bench.shapes import block_fp8
from fp8refit_sglang.bench import update_in_buckets
from fp8refit_sglang.compat import VERSIONS

_BUCKET_BYTES = 512 << 20
_RESERVED_TOKENS = 8
"""Context length that SGLang reserves for itself, rounded up."""


class SglangRollout:
    """Implements `fp8refit.bench.rollout_engine.RolloutEngine`."""

    def __init__(self, wanted: RolloutBoot) -> None:
        import sglang

        wanted.refuse_online("sglang")
        self.settings: dict[str, object] = {
            "load_format": "dummy",
            "json_model_override_args": json.dumps(
                {"quantization_config": block_fp8(wanted.model)} if wanted.is_fp8 else {}
            ),
            "tp_size": wanted.tp,
            "skip_tokenizer_init": True,
            "context_length": wanted.max_length + _RESERVED_TOKENS,
            "max_running_requests": wanted.max_batch,
            "kv_cache_dtype": "fp8_e4m3" if wanted.precision is Precision.FP8_KV else "auto",
        }
        if torch.cuda.is_available():
            self.settings["mem_fraction_static"] = MEMORY_SHARE
        else:
            self.settings |= {
                "device": "cpu",
                "dtype": "bfloat16",
                "max_total_tokens": 8192,
                "disable_cuda_graph": True,
            }
        self.settings |= wanted.arguments
        self.candidate = sglang.Engine(model_path=str(wanted.model), **self.settings)
        self.num_kv_tokens = int(self.candidate.get_server_info()["max_total_num_tokens"])

    def load_bf16(self, seed: int) -> None:
        """Load policy number `seed`."""
        manifest = policies.manifest_of(self.candidate)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        update_in_buckets(self.candidate, policies.stream(manifest, seed, device), _BUCKET_BYTES)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Continue every prompt by `num_tokens` sampled tokens, ignoring end of text."""
        sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
        self.candidate.generate(input_ids=[list(ids) for ids in prompts], sampling_params=sampling)

    def close(self) -> None:
        """Stop the engine and everything it started."""
        self.candidate.shutdown()


def boot(wanted: RolloutBoot) -> SglangRollout:
    """Boot an engine with random weights.

    Raises:
        UnsupportedEngineError: SGLang is not installed.
    """
    with VERSIONS.importing():
        return SglangRollout(wanted)
