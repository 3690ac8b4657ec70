"""The driver's side: one `vllm.LLM` in this process."""

import os
from dataclasses import replace
from typing import Any

import torch

from fp8refit.errors import CacheFlushError, EngineAsleepError, EngineBusyError, UnsupportedEngineError
from fp8refit.slots import Inventory, Refresh, Refusal
from fp8refit.target import Target
from fp8refit_vllm.compat import InProcessLLM, reset_kv_scales
from fp8refit_vllm.layout import read_inventory


class VllmEngine:
    """Implements `fp8refit.engine.Engine` for `vllm.LLM` with its engine core in this process, on one rank."""

    name = "vllm"

    def __init__(self, candidate: Any) -> None:
        self._llm = InProcessLLM(candidate)
        self._has_dummy_scales = self._llm.has_dummy_weights
        import vllm

        self.ranks = Target(
            self._read_inventory,
            device=self._llm.device,
            engine=self.name,
            versions={"vllm": vllm.__version__, "torch": torch.__version__},
        )

    @classmethod
    def accepts(cls, candidate: object) -> bool:
        """See `fp8refit.engine.Engine`."""
        return any(base.__module__.split(".")[0] == "vllm" for base in type(candidate).__mro__)

    @classmethod
    def boot(cls, model: str) -> Any:
        """See `fp8refit.engine.Engine`. A checkpoint that is not FP8 is quantized by vLLM itself."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            from transformers import AutoConfig
            from vllm import LLM
        except ImportError as error:
            raise UnsupportedEngineError(f"vLLM is not installed ({error}); pip install 'fp8refit[vllm]'") from error
        try:
            config = AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise UnsupportedEngineError(
                f"{model} is no model folder, nor a model to be had by that name: {error}"
            ) from error
        is_quantized = getattr(config, "quantization_config", None) is not None
        return LLM(
            model=model,
            load_format="dummy",
            enforce_eager=True,
            skip_tokenizer_init=True,
            quantization=None if is_quantized else "fp8_per_block",
        )

    def check_ready(self) -> None:
        """See `fp8refit.engine.Engine`."""
        if self._llm.has_unfinished_requests:
            raise EngineBusyError(
                "the engine has unfinished requests; a synchronous LLM cannot drain them without taking their outputs: "
                "finish or abort them, then refit"
            )
        if self._llm.are_weights_asleep:
            raise EngineAsleepError('the weights sleep; call llm.wake_up(tags=["weights"]) before refit')

    def block_requests(self, reason: str) -> None:
        """See `fp8refit.engine.Engine`."""
        self._llm.block_requests(reason)

    def unblock_requests(self) -> None:
        """See `fp8refit.engine.Engine`."""
        self._llm.unblock_requests()

    def flush_caches(self) -> None:
        """See `fp8refit.engine.Engine`."""
        if not self._llm.flush_caches():
            raise CacheFlushError(
                "vLLM kept its prefix cache because blocks of it are still held; the new weights are in place, but requests "
                "would read the old policy's KV. Free the blocks and refit again"
            )

    def _read_inventory(self) -> Inventory:
        inventory = read_inventory(self._llm.model)
        if self._llm.draft_method is not None:
            draft = Refusal(
                module="draft model",
                reason=f"drafts tokens with weights of its own ({self._llm.draft_method}), which a refit would leave behind",
                remedy="Boot without speculative_config",
            )
            inventory = replace(inventory, refusals=(*inventory.refusals, draft))
        if self._has_dummy_scales:
            refresh = Refresh(name="KV scales of a dummy boot", run=self._reset_dummy_scales)
            inventory = replace(inventory, refreshes=(*inventory.refreshes, refresh))
        return inventory

    def _reset_dummy_scales(self) -> None:
        """A dummy boot fills KV scales with noise; a boot from a checkpoint leaves 1.0. Done once."""
        if self._has_dummy_scales:
            reset_kv_scales(self._llm.model)
            self._has_dummy_scales = False
