"""vLLM and SGLang as `kv_modes.py` sees them."""

import json
import os
import time
from collections.abc import Sequence
from importlib import metadata

import policies
import torch
from measuring import log, wait_for_gpu
from tiny_models import FP8_CONFIG

from fp8refit import Refitter
from fp8refit.config import KvOrder, RefitConfig

QUANTIZED = {"quantization_config": FP8_CONFIG}


def versions() -> dict[str, str]:
    """Of what is installed here."""
    names = ("vllm", "sglang", "sglang-kernel", "torch", "transformers")
    installed = {name: metadata.version(name) for name in names if any(metadata.distributions(name=name))}
    return installed | {"cuda": str(torch.version.cuda)}


def boot_vllm(args, calibration: list[list[int]], **options) -> "VllmUnderTest":
    """A dummy engine with CUDA graphs; in this process if it is one rank's."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if args.tp == 1 else "1"
    from vllm import LLM

    policies.write_config(args.shape, args.work / "dummy")
    log("boot vllm")
    if args.backend:
        options["attention_backend"] = args.backend
    settings = {
        "model": str(args.work / "dummy"),
        "load_format": "dummy",
        "hf_overrides": QUANTIZED,
        "kv_cache_dtype": args.kv,
        "tensor_parallel_size": args.tp,
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.35,
        "kv_cache_memory_bytes": 8 << 30,  # else vLLM would profile, which fails if another process ends meanwhile
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    }
    llm = LLM(**settings | options)
    log("booted")
    return VllmUnderTest(llm, calibration)


class VllmUnderTest:
    """A `vllm.LLM`. What reaches into its rank works only if that is in this process."""

    def __init__(self, llm, calibration: list[list[int]]) -> None:
        self.candidate = llm
        self._calibration = [{"prompt_token_ids": prompt} for prompt in calibration]
        self._replays = [0]
        replay, count = torch.cuda.CUDAGraph.replay, self._replays

        def counted(graph):
            count[0] += 1
            return replay(graph)

        torch.cuda.CUDAGraph.replay = counted

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        outputs = self._generate(sequences, max_tokens=1, prompt_logprobs=0)
        return [
            [step[token].logprob for token, step in zip(sequence[1:], output.prompt_logprobs[1:], strict=True)]
            for sequence, output in zip(sequences, outputs, strict=True)
        ]

    def continue_(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        outputs = [output.outputs[0] for output in self._generate(prompts, max_tokens=num_tokens, logprobs=0)]
        tokens = [list(output.token_ids) for output in outputs]
        logprobs = [
            [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
            for output in outputs
        ]
        return tokens, logprobs

    def num_cached(self, prompt: Sequence[int]) -> int:
        return self._generate([prompt], max_tokens=1)[0].num_cached_tokens

    def drop_caches(self) -> None:
        assert self.candidate.reset_prefix_cache()

    def num_replays(self) -> int:
        return self._replays[0]

    def live_scales(self) -> dict[str, float] | None:
        """Every copy of every scale; None if the ranks are in other processes."""
        worker = self._worker()
        if worker is None:
            return None
        return {
            f"{name}.{key}": float(value)
            for name, module in worker.model_runner.get_model().named_modules()
            if hasattr(module, "_k_scale_float")
            for key, value in (vars(module) | module._buffers).items()
            if key.startswith(("_q_scale", "_k_scale", "_v_scale")) and value is not None
        }

    def prefill_s(self) -> float:
        from vllm import SamplingParams

        self.drop_caches()
        sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        wait_for_gpu()
        start_s = time.perf_counter()
        self.candidate.generate(self._calibration, sampling, use_tqdm=False)
        return time.perf_counter() - start_s

    def eager_prefill_s(self) -> float:
        """The engine's own prefill, with its model called as it is, not compiled."""
        from vllm import forward_context

        create = forward_context.create_forward_context

        def not_compiled(*arguments, **keywords):
            context = create(*arguments, **keywords)
            context.skip_compiled = True
            return context

        forward_context.create_forward_context = not_compiled
        try:
            return self.prefill_s()
        finally:
            forward_context.create_forward_context = create

    def same_pass_s(self, refitter: Refitter, calibration: list[list[int]], *, is_measured: bool) -> float:
        """The calibration pass alone, with maxima or without."""
        kv = refitter._engine.ranks._rank.target.live.kv
        sequences = [torch.tensor(ids, device="cuda") for ids in calibration]
        wait_for_gpu()
        start_s = time.perf_counter()
        if is_measured:
            kv.measure(KvOrder(token_ids=calibration), RefitConfig().kv)
        else:
            with torch.inference_mode():
                kv._cache.prefill(sequences, lambda *_: None)
        wait_for_gpu()
        return time.perf_counter() - start_s

    @property
    def is_rank_here(self) -> bool:
        """Whether its rank is in this process."""
        return self._worker() is not None

    def _worker(self):
        executor = getattr(self.candidate.llm_engine, "model_executor", None)
        return getattr(getattr(executor, "driver_worker", None), "worker", None)

    def _generate(self, prompts: Sequence[Sequence[int]], **options) -> list:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, **options)
        return self.candidate.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)


def boot_sglang(args, calibration: list[list[int]]) -> "SglangUnderTest":
    """A dummy engine with CUDA graphs, its scheduler in another process."""
    from sglang_modes import boot

    policies.write_config(args.shape, args.work / "dummy")
    options = {"attention_backend": args.backend} if args.backend else {}
    engine = boot(
        args.work / "dummy",
        load_format="dummy",
        json_model_override_args=json.dumps(QUANTIZED),
        kv_cache_dtype="fp8_e4m3" if args.kv == "fp8" else "auto",
        tp_size=args.tp,
        chunked_prefill_size=8192,
        **options,
    )
    return SglangUnderTest(engine, calibration)


class SglangUnderTest:
    """An `sglang.Engine`."""

    is_rank_here = False

    def __init__(self, engine, calibration: list[list[int]]) -> None:
        self.candidate = engine
        self._calibration = calibration

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        outputs = self._generate(sequences, 1, return_logprob=True, logprob_start_len=0)
        return [[float(entry[0]) for entry in output["meta_info"]["input_token_logprobs"][1:]] for output in outputs]

    def continue_(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        outputs = self._generate(prompts, num_tokens, return_logprob=True)
        logprobs = [[float(entry[0]) for entry in output["meta_info"]["output_token_logprobs"]] for output in outputs]
        return [list(output["output_ids"]) for output in outputs], logprobs

    def num_cached(self, prompt: Sequence[int]) -> int:
        return self._generate([prompt], 1)[0]["meta_info"]["cached_tokens"]

    def drop_caches(self) -> None:
        from sglang_modes import drop_caches

        drop_caches(self.candidate)

    def num_replays(self) -> int:
        from sglang_observer import ask

        return ask(self.candidate, "replays")[0]

    def live_scales(self) -> dict[str, float]:
        from sglang_observer import ask

        return ask(self.candidate, "kv_scales")[0]

    def prefill_s(self) -> float:
        self.drop_caches()
        start_s = time.perf_counter()
        self._generate(self._calibration, 1)
        return time.perf_counter() - start_s

    def _generate(self, prompts: Sequence[Sequence[int]], num_tokens: int, **options) -> list:
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        return self.candidate.generate(input_ids=[list(p) for p in prompts], sampling_params=sampling, **options)
