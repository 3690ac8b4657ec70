"""vLLM and SGLang as `experts_modes.py` sees them. Memory is asked for in bytes or tokens, so that many share a GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import policies
import torch
from tiny_models import FP8_CONFIG

SMALL = {"gpu_memory_utilization": 0.12, "kv_cache_memory_bytes": 2 << 30}
"""vLLM profiles nothing, so that engines on one GPU can start and end beside one another."""
FEW_TOKENS = {"mem_fraction_static": 0.5, "max_total_tokens": 8192}
"""SGLang holds what is free against the fraction, and engines beside it change that; its KV cache has these tokens."""
NCCL_ALONE = {"disable_custom_all_reduce": True, "enforce_disable_flashinfer_allreduce_fusion": True}
"""SGLang compiles its other sums over ranks at their first use, from sources that not every host has."""


def quantization(shape: str) -> dict:
    """Of an engine of noise. Routers stay in BF16, as in every published checkpoint."""
    layers = range(policies.SHAPES[shape]["num_hidden_layers"])
    ignored = [*FP8_CONFIG["modules_to_not_convert"], *(f"model.layers.{layer}.mlp.gate" for layer in layers)]
    return {"quantization_config": FP8_CONFIG | {"modules_to_not_convert": ignored}}


class VllmUnderTest:
    """A `vllm.LLM`.

    Args:
        args: Of the script.
        model: A checkpoint, or a folder with a config alone.
        is_noise: Whether it is the latter.
        options: Others of vLLM's.
    """

    def __init__(self, args, model: Path, *, is_noise: bool = False, **options: Any) -> None:
        from layout_modes import settings
        from vllm import LLM

        options |= {"tensor_parallel_size": args.tp, "enable_expert_parallel": args.ep, "enforce_eager": args.eager}
        if is_noise:
            options |= {"load_format": "dummy", "hf_overrides": quantization(args.shape)}
        if args.attention:
            options["attention_backend"] = args.attention
        self.candidate = LLM(**settings(model, **SMALL | options))

    def observe(self) -> dict:
        from layout_modes import observe

        return observe(self.candidate)

    def places(self) -> list[dict[str, int]]:
        return self.candidate.collective_rpc("observe_places")

    def compile_kernels(self) -> float:
        """In the engine's process. Returns seconds."""
        return self.candidate.collective_rpc("observe_compile")[0]

    def look_at_loader(self) -> dict:
        """What tracing it again costs, for an engine in this process."""
        from fp8refit_vllm.layout import VllmRules
        from fp8refit_vllm.twin import twin_of
        from twin_cost import look

        from fp8refit.tracing.inventory import inventory_of

        worker = self.candidate.llm_engine.model_executor.driver_worker.worker
        return look(
            worker.model_runner.get_model(),
            lambda: twin_of(worker.vllm_config),
            lambda model, twin: inventory_of(model, VllmRules(), twin),
        )

    def look_at_held(self) -> dict:
        """What the model of an engine in this process holds."""
        from fp8refit_vllm.twin import _apart, _built
        from held_cost import look
        from vllm.config import set_current_vllm_config

        from fp8refit.tracing.twin import EmptyOnMeta

        worker = self.candidate.llm_engine.model_executor.driver_worker.worker
        config = _apart(worker.vllm_config)
        with set_current_vllm_config(config):
            return look(worker.model_runner.get_model(), lambda: _built(config, EmptyOnMeta()))

    def reload(self, checkpoint: Path) -> None:
        """It leaves scales of experts that nothing reads, and reads others: a refit has to write both."""
        self.candidate.collective_rpc("observe_reload", args=(str(checkpoint),))

    def shutdown(self) -> None:
        self.candidate.llm_engine.engine_core.shutdown()


class SglangUnderTest:
    """An `sglang.Engine`.

    Args:
        args: Of the script.
        model: A checkpoint, or a folder with a config alone.
        is_noise: Whether it is the latter.
        options: Others of SGLang's.
    """

    def __init__(self, args, model: Path, *, is_noise: bool = False, **options: Any) -> None:
        from sglang_modes import boot

        options = {"tp_size": args.tp, "ep_size": args.tp if args.ep else 1, **FEW_TOKENS, **options}
        if torch.cuda.is_available():
            options |= NCCL_ALONE | {"disable_cuda_graph": args.eager}
        if is_noise:
            options |= {"load_format": "dummy", "json_model_override_args": json.dumps(quantization(args.shape))}
        if args.attention:
            options["attention_backend"] = args.attention
        self.candidate = boot(model, **options)

    def observe(self) -> dict:
        from sglang_modes import observe

        return observe(self.candidate)

    def places(self) -> list[dict[str, int]]:
        from sglang_observer import ask

        return ask(self.candidate, "places")

    def compile_kernels(self) -> float:
        """In the engine's process. Returns seconds."""
        from sglang_observer import ask

        return ask(self.candidate, "compile")[0]

    def look_at_loader(self) -> dict:
        """What tracing it again costs, in the engine's process."""
        from sglang_observer import ask

        return ask(self.candidate, "loader")[0]

    def look_at_held(self) -> dict:
        """What the model holds, in the engine's process."""
        from sglang_observer import ask

        return ask(self.candidate, "held")[0]

    def reload(self, checkpoint: Path) -> None:
        success, message, *_ = self.candidate.update_weights_from_disk(str(checkpoint), load_format="auto")
        assert success, message

    def shutdown(self) -> None:
        self.candidate.shutdown()


ENGINES: dict[str, Callable[..., VllmUnderTest | SglangUnderTest]] = {"vllm": VllmUnderTest, "sglang": SglangUnderTest}
