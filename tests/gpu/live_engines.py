"""vLLM and SGLang as the scenarios here see them: booted on noise or from a checkpoint, asked for tokens, and looked at.

`ask` gives what every rank finds of what `live_model.look` and the observers of both engines know.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from harness import log, seconds_of

from fp8refit.bench.shapes import block_fp8

PROMPTS = [[(31 * i + 7 * j) % 50000 + 100 for j in range(24 + 8 * i)] for i in range(4)]
NUM_NEW = 24
HAS_GPU = torch.cuda.is_available()
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""CUDA graphs without torch.compile, which would take most of the time."""
SMALL = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
"""vLLM profiles nothing, so that engines on one GPU can start and end beside one another."""


class Observed:
    """A live engine, which can be looked at.

    Args:
        model: A checkpoint, or a folder with a config alone.
        is_noise: Whether it is the latter.
        options: The engine's own.
    """

    candidate: Any
    """For `Refitter`."""

    def observe(self, prompts: Sequence[Sequence[int]] = PROMPTS) -> dict:
        """What it says, and every rank's live bytes."""
        log("observe")
        self.drop_caches()
        before = self.ask("replays")
        generated = self.generate(prompts)
        after = self.ask("replays")
        return {
            "generated": generated,
            "graph_replays": [b - a for a, b in zip(before, after, strict=True)],
            "live": self.ask("live_bytes"),
        }

    def prefill_s(self, prompts: Sequence[Sequence[int]]) -> float:
        """Seconds that its normal prefill takes."""
        self.drop_caches()
        return seconds_of(lambda: self.say(prompts, 1))


class Vllm(Observed):
    """A `vllm.LLM`. A rank in this process can be looked into."""

    def __init__(self, model: Path, *, is_inside: bool = False, is_noise: bool = False, **options: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if is_inside else "1"
        # Else torch.compile times ways to sum, and two engines with the same weights may differ in the last bits.
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
        from vllm import LLM

        log(f"boot {model.name}")
        self.candidate = LLM(**vllm_settings(model, is_noise=is_noise, **options))
        log("booted")

    def ask(self, what: str) -> list:
        return self.candidate.collective_rpc("observe_rank", args=(what,))

    def generate(self, prompts: Sequence[Sequence[int]] = PROMPTS) -> dict:
        """Greedy tokens and every log-probability, as exact hexadecimal floats."""
        outputs = self._outputs(prompts, NUM_NEW, logprobs=4, prompt_logprobs=0)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "logprobs": [_exact(output.outputs[0].logprobs) for output in outputs],
            "prompt_logprobs": [_exact(output.prompt_logprobs) for output in outputs],
        }

    def say(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy tokens."""
        return [list(output.outputs[0].token_ids) for output in self._outputs(prompts, num_tokens)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token but the first, by one prefill."""
        outputs = self._outputs(sequences, 1, prompt_logprobs=0)
        return [
            [step[token].logprob for token, step in zip(sequence[1:], output.prompt_logprobs[1:], strict=True)]
            for sequence, output in zip(sequences, outputs, strict=True)
        ]

    def continue_(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        """Greedy tokens and their log-probabilities."""
        outputs = [output.outputs[0] for output in self._outputs(prompts, num_tokens, logprobs=0)]
        logprobs = [
            [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
            for output in outputs
        ]
        return [list(output.token_ids) for output in outputs], logprobs

    def num_cached(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt the prefix cache had."""
        return self._outputs([prompt], 1)[0].num_cached_tokens

    def drop_caches(self) -> None:
        assert self.candidate.reset_prefix_cache()

    @property
    def worker(self) -> Any:
        """Of the rank in this process; None if it is in another."""
        executor = getattr(self.candidate.llm_engine, "model_executor", None)
        return getattr(getattr(executor, "driver_worker", None), "worker", None)

    def reload(self, checkpoint: Path) -> None:
        """It leaves scales of experts that nothing reads, and reads others: a refit has to write both."""
        self.candidate.collective_rpc("observe_reload", args=(str(checkpoint),))

    @staticmethod
    def naps() -> Iterator[tuple[str, dict[str, Any], list[str]]]:
        """Ways to sleep: their name, arguments, and the order in which tags wake up.

        Not level 2 with the KV cache first: vLLM 0.26 then restores buffers into weights that are not mapped, a CUDA fault of
        its own.
        """
        yield "level 1, weights first", {"level": 1}, ["weights", "kv_cache"]
        yield "level 1, kv_cache first", {"level": 1}, ["kv_cache", "weights"]
        yield "level 2, weights first", {"level": 2}, ["weights", "kv_cache"]

    def sleep(self, **how: Any) -> None:
        self.candidate.sleep(**how)

    def wake(self, tag: str) -> None:
        self.candidate.wake_up(tags=[tag])

    def shutdown(self) -> None:
        self.candidate.llm_engine.engine_core.shutdown()

    def _outputs(self, prompts: Sequence[Sequence[int]], num_tokens: int, **options: Any) -> list:
        return self.candidate.generate(as_prompts(prompts), greedy(num_tokens, **options), use_tqdm=False)


def as_prompts(prompts: Sequence[Sequence[int]]) -> list[dict[str, list[int]]]:
    """For vLLM."""
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


def greedy(num_tokens: int, **options: Any) -> Any:
    """`SamplingParams` of vLLM's."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=num_tokens, temperature=0, detokenize=False, ignore_eos=True, **options)


def _exact(steps: Sequence[dict | None]) -> list[dict[str, str]]:
    """The first token of a prompt has none."""
    return [{str(token): entry.logprob.hex() for token, entry in step.items()} for step in steps if step]


def vllm_settings(
    model: Path, *, is_noise: bool = False, is_compiled: bool = False, checkpoint: str | None = None, **options: Any
) -> dict[str, Any]:
    """Arguments of `LLM`; on a CPU those of a tiny shape with the tests' own kernel, to try a script.

    Args:
        model: As for an engine.
        is_noise: As there.
        is_compiled: Whether by torch.compile.
        checkpoint: Of what the noise is, if not block FP8.
        options: Instead of those here.
    """
    settings = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.35,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]} | ({} if is_compiled else GRAPHS),
        "worker_extension_cls": "live_model.Observer",
    }
    if not is_compiled:
        settings["max_num_batched_tokens"] = 2048
    if is_noise:
        settings |= {"load_format": "dummy", "hf_overrides": {"quantization_config": block_fp8(model, checkpoint)}}
    return settings | options | _on_a_cpu()


def _on_a_cpu() -> dict[str, Any]:
    """Nothing on a GPU. An engine in a process of its own finds the kernel by a plugin, as in `tests/vllm/conftest.py`."""
    if HAS_GPU:
        return {}
    sys.path.append(str(Path(__file__).parents[1] / "vllm"))
    import cpu_kernel

    torch.compiler.set_stance("force_eager")
    cpu_kernel.register(os.environ.get("FP8REFIT_TEST_KERNEL", "fp32"))
    room = {"max_model_len": 512, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 64}
    return room | {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": None,
    }


@contextmanager
def gpus_alone(first: int, count: int) -> Iterator[None]:
    """What is started within sees only some of the GPUs; this process, which has looked at them all, goes on seeing them."""
    torch.cuda.init()
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = before.split(",") if before else [str(index) for index in range(torch.cuda.device_count())]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + count])
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


class Sglang(Observed):
    """An `sglang.Engine`, whose schedulers are in other processes and can be looked at."""

    worker = None

    def __init__(self, model: Path, *, is_noise: bool = False, **options: Any) -> None:
        import sglang
        import sglang_observer

        log(f"boot {model.name}")
        sglang_observer.install(model.parent / "plugin")
        self._ask = sglang_observer.ask
        settings = {
            "model_path": str(model),
            "skip_tokenizer_init": True,
            "context_length": 2048,
            "max_running_requests": 16,
            "random_seed": 0,
            "log_level": "info",
            **(SGLANG_ON_A_GPU if HAS_GPU else SGLANG_ON_A_CPU),
        }
        if is_noise:
            quantization = {"quantization_config": block_fp8(model)}
            settings |= {"load_format": "dummy", "json_model_override_args": json.dumps(quantization)}
        self.candidate = sglang.Engine(**settings | options)
        log("booted")

    def ask(self, what: str) -> list:
        return self._ask(self.candidate, what)

    def generate(self, prompts: Sequence[Sequence[int]] = PROMPTS) -> dict:
        """Greedy tokens and every log-probability, as exact hexadecimal floats.

        One prompt after another: how requests fall into batches is a matter of time, and moves the last bits.
        """
        asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 4}
        outputs = [self._outputs([prompt], NUM_NEW, **asked)[0] for prompt in prompts]
        metas = [output["meta_info"] for output in outputs]
        return {
            "tokens": [list(output["output_ids"]) for output in outputs],
            "logprobs": [[_exactly(step) for step in meta["output_top_logprobs"]] for meta in metas],
            "prompt_logprobs": [_exactly(meta["input_token_logprobs"]) for meta in metas],
        }

    def say(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy tokens."""
        return [list(output["output_ids"]) for output in self._outputs(prompts, num_tokens)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token but the first, by one prefill."""
        outputs = self._outputs(sequences, 1, return_logprob=True, logprob_start_len=0)
        return [[float(entry[0]) for entry in output["meta_info"]["input_token_logprobs"][1:]] for output in outputs]

    def continue_(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        """Greedy tokens and their log-probabilities."""
        outputs = self._outputs(prompts, num_tokens, return_logprob=True)
        logprobs = [[float(entry[0]) for entry in output["meta_info"]["output_token_logprobs"]] for output in outputs]
        return [list(output["output_ids"]) for output in outputs], logprobs

    def num_cached(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt the prefix cache had."""
        return self._outputs([prompt], 1)[0]["meta_info"]["cached_tokens"]

    def drop_caches(self) -> None:
        """And so wait until the scheduler has noticed that its last request is over."""
        for _ in range(100):
            if self.candidate.flush_cache().success:
                return
            time.sleep(0.02)
        raise AssertionError("the scheduler does not come to rest")

    def reload(self, checkpoint: Path) -> None:
        success, message, *_ = self.candidate.update_weights_from_disk(str(checkpoint), load_format="auto")
        assert success, message

    @staticmethod
    def naps() -> Iterator[tuple[str, dict[str, Any], list[str]]]:
        """Ways to sleep: their name, arguments, and the order in which tags wake up."""
        for order in (["weights", "kv_cache"], ["kv_cache", "weights"]):
            yield f"{order[0]} first", {"tags": ["kv_cache", "weights"]}, order

    def sleep(self, **how: Any) -> None:
        self.candidate.release_memory_occupation(**how)

    def wake(self, tag: str) -> None:
        self.candidate.resume_memory_occupation(tags=[tag])

    def shutdown(self) -> None:
        self.candidate.shutdown()

    def _outputs(self, prompts: Sequence[Sequence[int]], num_tokens: int, **options: Any) -> list:
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        return self.candidate.generate(input_ids=list(map(list, prompts)), sampling_params=sampling, **options)


Engine: TypeAlias = Vllm | Sglang

SGLANG_ON_A_GPU = {
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "cuda_graph_max_bs_decode": 4,
    "disable_prefill_cuda_graph": True,
    # Both policies of the trainer, its buckets and the copies that are timed live on the same GPU.
    "mem_fraction_static": 0.25,
}
SGLANG_ON_A_CPU = {"device": "cpu", "dtype": "bfloat16", "disable_cuda_graph": True, "max_total_tokens": 2048}


def _exactly(entries: list) -> list:
    """Tokens and log-probabilities; the first token of a prompt has none."""
    return [[token, None if logprob is None else float(logprob).hex()] for logprob, token, *_ in entries]
