"""vLLM in the rollout benchmark, with its usual settings: compiled, with CUDA graphs."""

import os
from collections.abc import Mapping, Sequence

import torch

from fp8refit.bench import policies
from fp8refit.bench.rollout_engine import MEMORY_SHARE, Precision, RolloutBoot
from fp8refit.bench.shapes import block_fp8
from fp8refit.live.slots import TensorMeta
from fp8refit_vllm.bench import shut_down
from fp8refit_vllm.compat import VERSIONS
from fp8refit_vllm.worker import Extension


class RolloutWorker(Extension):
    """What is added to vLLM's worker."""

    def load_policy(self, shapes: Mapping[str, tuple[Sequence[int], str]], seed: int) -> None:
        """Load policy number `seed` by vLLM's own `reload_weights`, created tensor by tensor on the worker's device.

        Args:
            shapes: Shape and dtype of every tensor, by name.
            seed: Number of the policy.
        """
        manifest = {
            name: TensorMeta(shape=tuple(shape), dtype=getattr(torch, dtype)) for name, (shape, dtype) in shapes.items()
        }
        with torch.no_grad():
            self.reload_weights(weights_iterator=policies.stream(manifest, seed, self.device))  # type: ignore[attr-defined]


class VllmRollout:
    """Implements `fp8refit.bench.rollout_engine.RolloutEngine` in processes of its own, which free their memory when they
    end.
    """

    def __init__(self, wanted: RolloutBoot) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # the command line runs a progress thread
        from vllm import LLM

        self.settings: dict[str, object] = {
            "load_format": "dummy",
            "tensor_parallel_size": wanted.tp,
            "skip_tokenizer_init": True,
            "max_model_len": wanted.max_length,
            "max_num_seqs": wanted.max_batch,
            "enforce_eager": not torch.cuda.is_available(),
            "kv_cache_dtype": "fp8" if wanted.precision is Precision.FP8_KV else "auto",
            "worker_extension_cls": f"{RolloutWorker.__module__}.{RolloutWorker.__qualname__}",
        }
        if wanted.precision.online is not None:
            self.settings["quantization"] = wanted.precision.online
        elif wanted.is_fp8:
            self.settings["hf_overrides"] = {"quantization_config": block_fp8(wanted.model)}
        if torch.cuda.is_available():
            self.settings["gpu_memory_utilization"] = MEMORY_SHARE
        self.settings |= wanted.arguments
        self.candidate = LLM(model=str(wanted.model), **self.settings)
        cache = self.candidate.llm_engine.vllm_config.cache_config
        self.num_kv_tokens = cache.num_gpu_blocks * cache.block_size

    def load_bf16(self, seed: int) -> None:
        """Load policy number `seed`."""
        manifest = policies.manifest_of(self.candidate)
        shapes = {name: (list(meta.shape), str(meta.dtype).removeprefix("torch.")) for name, meta in manifest.items()}
        self.candidate.collective_rpc("load_policy", args=(shapes, seed))

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Continue every prompt by `num_tokens` sampled tokens, ignoring end of text."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=num_tokens, temperature=1.0, ignore_eos=True, detokenize=False)
        self.candidate.generate([{"prompt_token_ids": list(ids)} for ids in prompts], sampling, use_tqdm=False)

    def close(self) -> None:
        """Stop the engine and everything it started."""
        shut_down(self)


def boot(wanted: RolloutBoot) -> VllmRollout:
    """Boot an engine with random weights.

    Raises:
        UnsupportedEngineError: vLLM is not installed.
    """
    with VERSIONS.importing():
        return VllmRollout(wanted)
