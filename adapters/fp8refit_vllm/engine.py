"""vLLM as an engine: `LLM` and `AsyncLLM`, with workers in this process or in others."""

import os
from collections.abc import Sequence
from typing import Any

from fp8refit.config import RefitConfig
from fp8refit.engine import LocalRanks, Ranks
from fp8refit.errors import UnsupportedEngineError
from fp8refit.remote import RemoteRanks
from fp8refit_vllm.async_driver import AsyncDriver
from fp8refit_vllm.compat import is_async_client, loads_plugin
from fp8refit_vllm.driver import SyncDriver
from fp8refit_vllm.worker import EXTENSION_METHOD, PLUGIN_METHOD, WorkerExtension, make_rank

PLUGIN = "fp8refit"
"""Name of our entry point among vLLM's general plugins."""


class VllmEngine:
    """Implements `fp8refit.engine.Engine` for `vllm.LLM` and `AsyncLLM`.

    Args:
        candidate: The LLM or AsyncLLM.

    Raises:
        UnsupportedEngineError: It is something else of vLLM's, runs data-parallel replicas, or its workers do not have our
            method.
    """

    name = "vllm"

    def __init__(self, candidate: Any) -> None:
        self._driver = _drive(candidate)
        self.is_asynchronous = self._driver.is_asynchronous
        self.ranks: Ranks
        if self._driver.worker is not None:
            self.ranks = LocalRanks(make_rank(self._driver.worker))
        else:
            self.ranks = RemoteRanks(self._driver)

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

    async def check_ready(self) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._driver.check_ready()

    async def pause(self, config: RefitConfig) -> int:
        """See `fp8refit.engine.Engine`."""
        return await self._driver.pause(config)

    async def resume(self) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._driver.resume()

    async def refuse(self, reason: str) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._driver.refuse(reason)

    async def flush_caches(self) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._driver.flush_caches()

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """See `fp8refit.engine.Engine`."""
        return await self._driver.tokenize(prompts)

    async def publish_version(self, version: int) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._driver.publish_version(version)


def _drive(candidate: Any) -> SyncDriver | AsyncDriver:
    """The driver for a client of vLLM's."""
    is_async = is_async_client(candidate)
    engine = candidate if is_async else getattr(candidate, "llm_engine", None)
    if engine is None:
        raise UnsupportedEngineError(
            f"{type(candidate).__name__} is neither a vllm.LLM nor an AsyncLLM; pass the LLM itself"
        )
    parallel = engine.vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        raise UnsupportedEngineError(
            f"the engine runs {parallel.data_parallel_size} data-parallel replicas behind one client, which hears from "
            "one of them; start one engine a replica, and refit each"
        )
    is_extended = parallel.worker_extension_cls == f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"
    driver = (AsyncDriver if is_async else SyncDriver)(candidate, EXTENSION_METHOD if is_extended else PLUGIN_METHOD)
    if driver.worker is None and not is_extended and not loads_plugin(PLUGIN):
        raise UnsupportedEngineError(
            "the workers of this engine run in other processes, where vLLM does not load fp8refit's plugin: install fp8refit "
            "(a path alone has no entry points), leave it in VLLM_PLUGINS, or boot the engine with "
            f'worker_extension_cls="{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"'
        )
    return driver
