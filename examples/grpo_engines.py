"""The engines of `grpo.py` (vLLM, SGLang, transformers): sample with log-probabilities, and take a new policy."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported: its engine is in this process

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fp8refit import Refitter
from fp8refit.bench.shapes import block_fp8
from fp8refit.training.precision import Unified

MAX_CALIBRATION = 64
"""Number of sequences to calibrate an FP8 KV cache with."""


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Answers that an engine sampled."""

    prompts: Tensor
    """(B, P)"""
    tokens: Tensor
    """(B, L), zeros after the end."""
    logprobs: Tensor
    """(B, L), the engine's own, at temperature 1."""
    mask: Tensor
    """(B, L), bool: the sampled tokens, including the end token."""

    @classmethod
    def of(cls, prompts: Tensor, answers: list[tuple[list[int], list[float]]], length: int) -> "Rollouts":
        """Put tokens and log-probabilities of each answer into rows of `length`."""
        tokens = torch.tensor([[*tokens, *[0] * (length - len(tokens))] for tokens, _ in answers])
        logprobs = torch.tensor([[*values, *[0.0] * (length - len(values))] for _, values in answers])
        mask = torch.arange(length) < torch.tensor([[len(tokens)] for tokens, _ in answers])
        device = prompts.device
        return cls(prompts=prompts, tokens=tokens.to(device), logprobs=logprobs.to(device), mask=mask.to(device))

    @property
    def calibration(self) -> list[list[int]]:
        """Sequences to calibrate KV scales with."""
        sequences, lengths = torch.cat([self.prompts, self.tokens], 1).tolist(), self.mask.sum(-1).tolist()
        chosen = zip(sequences, lengths, strict=True)
        whole = [tokens[: self.prompts.shape[1] + length] for tokens, length in chosen]
        return whole[:: max(1, len(whole) // MAX_CALIBRATION)]


class Engine:
    """An engine of one precision, whose weights are updated while it runs."""

    version: dict[str, str]
    refitter: Refitter | None = None
    """None in BF16, where the engine's own update is used."""

    def generate(self, prompts: Tensor, *, max_tokens: int, end: int) -> Rollouts:
        """Sample an answer to each prompt, up to the token `end`."""
        raise NotImplementedError

    def load_bf16(self, policy: nn.Module) -> None:
        """Load `policy` into a BF16 engine."""
        raise NotImplementedError

    def update(self, policy: nn.Module | Unified, calibration: list[list[int]] | None) -> None:
        """Load `policy` into the engine, and set KV scales by `calibration`."""
        if isinstance(policy, Unified):
            assert self.refitter is not None, "only FP8 engines have a trainer in their precision"
            report = self.refitter.refit(policy.served(), calibration=calibration)
            assert report.num_quantized == 0, "the engine takes the bytes that the trainer computes with"
        elif self.refitter is not None:
            self.refitter.refit(policy.state_dict(), calibration=calibration)
        else:
            self.load_bf16(policy)

    @property
    def kernels(self) -> list[str]:
        """Kernels and formats of the layers."""
        if self.refitter is None:
            return ["bfloat16"]
        return sorted(
            {f"{slot.kernel} {slot.scale_format or slot.dtype}".strip() for slot in self.refitter.layout().slots}
        )


class VllmEngine(Engine):
    def __init__(self, model: Path, precision: str, options: dict[str, Any]) -> None:
        import vllm

        self.version = {"vllm": vllm.__version__}
        settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 256, "gpu_memory_utilization": 0.3}
        settings["kv_cache_dtype"] = "fp8" if precision == "fp8kv" else "auto"
        if precision != "bf16":
            settings["quantization"] = "fp8_per_block"
        self.llm = vllm.LLM(model=str(model), dtype="bfloat16", **settings | options)
        self.refitter = Refitter(self.llm) if precision != "bf16" else None
        self.sampling = vllm.SamplingParams(temperature=1.0, logprobs=0, detokenize=False)

    def generate(self, prompts: Tensor, *, max_tokens: int, end: int) -> Rollouts:
        self.sampling.max_tokens, self.sampling.stop_token_ids = max_tokens, [end]
        asked = [{"prompt_token_ids": tokens} for tokens in prompts.tolist()]
        answers = [output.outputs[0] for output in self.llm.generate(asked, self.sampling, use_tqdm=False)]
        steps = [zip(answer.token_ids, answer.logprobs, strict=True) for answer in answers]
        logprobs = [[said[token].logprob for token, said in pairs] for pairs in steps]
        return Rollouts.of(
            prompts, list(zip((answer.token_ids for answer in answers), logprobs, strict=True)), max_tokens
        )

    def load_bf16(self, policy: nn.Module) -> None:
        self.llm.apply_model(lambda model: bool(model.load_weights(policy.state_dict().items())))
        self.llm.reset_prefix_cache()


class SglangEngine(Engine):
    def __init__(self, model: Path, precision: str, options: dict[str, Any]) -> None:
        import sglang

        self.version = {"sglang": sglang.__version__}
        quantization = {} if precision == "bf16" else {"quantization_config": block_fp8(model)}
        settings = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "context_length": 256,
            "mem_fraction_static": 0.3,
        }
        settings["json_model_override_args"] = json.dumps(quantization)
        settings["kv_cache_dtype"] = "fp8_e4m3" if precision == "fp8kv" else "auto"
        self.engine = sglang.Engine(model_path=str(model), dtype="bfloat16", **settings | options)
        self.refitter = Refitter(self.engine) if precision != "bf16" else None

    def generate(self, prompts: Tensor, *, max_tokens: int, end: int) -> Rollouts:
        sampling = {"temperature": 1.0, "max_new_tokens": max_tokens, "stop_token_ids": [end]}
        answers = self.engine.generate(input_ids=prompts.tolist(), sampling_params=sampling, return_logprob=True)
        steps = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
        return Rollouts.of(
            prompts, [([step[1] for step in row], [step[0] for step in row]) for row in steps], max_tokens
        )

    def load_bf16(self, policy: nn.Module) -> None:
        weights = [(name, tensor.bfloat16()) for name, tensor in policy.state_dict().items()]
        needs_session = hasattr(self.engine, "begin_weight_update")  # SGLang 0.5.23
        if needs_session:
            self.engine.begin_weight_update()
        self.engine.update_weights_from_tensor(weights, flush_cache=True)
        if needs_session:
            self.engine.end_weight_update()


class TransformersEngine(Engine):
    def __init__(self, model: Path, precision: str, options: dict[str, Any]) -> None:
        from fp8refit_transformers import to_block_fp8

        self.version = {"transformers": sys.modules["transformers"].__version__}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **options).to(device).eval()
        if precision != "bf16":
            to_block_fp8(self.model, kv_cache_dtype="fp8" if precision == "fp8kv" else "auto")
            self.refitter = Refitter(self.model)

    @torch.no_grad()
    def generate(self, prompts: Tensor, *, max_tokens: int, end: int) -> Rollouts:
        said = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max_tokens,
            eos_token_id=end,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = said.sequences[:, prompts.shape[1] :]
        logprobs = torch.stack(said.logits, 1).float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        is_end = (tokens == end).int()
        lengths = (is_end.cumsum(-1) - is_end == 0).sum(-1).tolist()
        rows = zip(tokens.tolist(), logprobs.tolist(), lengths, strict=True)
        return Rollouts.of(prompts, [(row[:length], values[:length]) for row, values, length in rows], max_tokens)

    def load_bf16(self, policy: nn.Module) -> None:
        self.model.load_state_dict(policy.state_dict())


ENGINES = {"vllm": VllmEngine, "sglang": SglangEngine, "transformers": TransformersEngine}
