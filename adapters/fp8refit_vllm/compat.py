"""The only file that reaches into a live vLLM engine. It probes attributes, not versions (seen with 0.26 and 0.32)."""

from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.errors import EngineDirtyError, UnsupportedEngineError

_IN_PROCESS_HINT = (
    "set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM is imported, so that the engine runs in this process "
    "(fp8refit does not reach into other processes yet)"
)

_DRAFTS_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")


class InProcessLLM:
    """A `vllm.LLM` whose engine core, scheduler and single worker live in this process.

    Raises:
        UnsupportedEngineError: The engine runs elsewhere, or on more than one rank.
    """

    def __init__(self, llm: Any) -> None:
        engine = getattr(llm, "llm_engine", None)
        if engine is None:
            raise UnsupportedEngineError(f"{type(llm).__name__} is not a vllm.LLM; pass the LLM itself")
        core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
        if core is None:
            raise UnsupportedEngineError(
                f"{type(llm).__name__} runs its engine core in another process; {_IN_PROCESS_HINT}"
            )
        self.llm = llm
        self.engine = engine
        self.executor = core.model_executor
        self.config = engine.vllm_config
        num_ranks = self.config.parallel_config.world_size
        if num_ranks != 1:
            raise UnsupportedEngineError(
                f"the engine runs on {num_ranks} ranks, and fp8refit writes one so far; set tensor_parallel_size=1"
            )
        driver = getattr(self.executor, "driver_worker", None)
        worker = getattr(driver, "worker", None)
        if worker is None:
            raise UnsupportedEngineError(
                f"{type(self.executor).__name__} keeps its worker elsewhere; {_IN_PROCESS_HINT}"
            )
        self.worker = worker

    @property
    def model(self) -> nn.Module:
        """The live model, without the wrappers that replay CUDA graphs."""
        model: nn.Module = self.worker.model_runner.get_model()
        return model

    @property
    def device(self) -> torch.device:
        """Where the weights are, with an index if it is a GPU."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.engine.has_unfinished_requests())

    @property
    def has_dummy_weights(self) -> bool:
        """Whether the engine was booted without a checkpoint's values."""
        return (
            str(getattr(self.config.load_config.load_format, "value", self.config.load_config.load_format)) == "dummy"
        )

    @property
    def draft_method(self) -> str | None:
        """How the engine drafts tokens with weights of their own, or None if it drafts without or not at all."""
        speculative = self.config.speculative_config
        method = getattr(speculative, "method", None)
        return None if method is None or method in _DRAFTS_WITHOUT_WEIGHTS else str(method)

    @property
    def are_weights_asleep(self) -> bool:
        """Whether sleep mode has unmapped the weights. `LLM.is_sleeping` is also true when only the scheduler is paused."""
        return "weights" in getattr(self.executor, "sleeping_tags", ())

    def block_requests(self, reason: str) -> None:
        """Refuse at admission, on this instance alone; every entry (`generate`, `chat`, `encode`) adds requests here."""

        def refuse(*_: Any, **__: Any) -> None:
            raise EngineDirtyError(f"{reason}. This engine serves again after the next refit that succeeds")

        self.engine.__dict__["add_request"] = refuse

    def unblock_requests(self) -> None:
        """Take the refusal away."""
        self.engine.__dict__.pop("add_request", None)

    def flush_caches(self) -> bool:
        """Drop prefix, connector, multimodal and encoder caches; False if blocks of the prefix cache are still held."""
        if self.config.model_config.is_multimodal_model:
            self.engine.reset_mm_cache()
            self.engine.reset_encoder_cache()
        has_connector = self.config.kv_transfer_config is not None
        return bool(self.engine.reset_prefix_cache(False, has_connector))


def linear_kernel(module: nn.Module) -> object | None:
    """The object that multiplies by a block-FP8 module's weight."""
    return getattr(getattr(module, "quant_method", None), "fp8_linear", None)


def wants_powers_of_two(kernel: object | None) -> bool:
    """Whether the kernel rounded its scales to powers of two when the engine booted (DeepGEMM with UE8M0)."""
    flag = getattr(kernel, "use_deep_gemm_e8m0", None)
    if flag is None:
        flag = getattr(getattr(kernel, "fallback", None), "use_deep_gemm_e8m0", False)
    return bool(flag)


def kv_scale_buffers(module: nn.Module) -> list[Tensor]:
    """The scale buffers of an attention layer."""
    names = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")
    return [module._buffers[name] for name in names if module._buffers.get(name) is not None]  # type: ignore[misc]


def reset_kv_scales(model: nn.Module) -> None:
    """Set every copy of every KV-cache scale to 1.0, as a boot from a checkpoint without KV scales does."""
    for module in model.modules():
        buffers = kv_scale_buffers(module)
        if not buffers or not hasattr(module, "_k_scale_float"):
            continue
        for buffer in buffers:
            buffer.fill_(1.0)
        for name in ("_q_scale_float", "_k_scale_float", "_v_scale_float", "_prob_scale_float"):
            if hasattr(module, name):
                setattr(module, name, 1.0)
        for name in ("_k_scale_cpu", "_v_scale_cpu"):
            if hasattr(module, name):
                getattr(module, name).fill_(1.0)
