"""vLLM's implementation of `Engine`: picks the driver for an `LLM`, an `AsyncLLM`, a worker or a server."""

import os
import sys
from typing import Any

from fp8refit.driver.adapters import booting
from fp8refit.driver.engine import DelegatingEngine
from fp8refit.driver.local_ranks import LocalRanks
from fp8refit.errors import UnsupportedEngineError
from fp8refit.remote.ranks import RemoteRanks
from fp8refit.remote.servers.server_driver import ServedRanks, ServerDriver
from fp8refit_vllm.async_driver import AsyncDriver
from fp8refit_vllm.clients import check_layout, check_workers, method_of
from fp8refit_vllm.compat import VERSIONS, is_async_client
from fp8refit_vllm.driver import SyncDriver
from fp8refit_vllm.server import VllmServer
from fp8refit_vllm.worker import rank_of
from fp8refit_vllm.worker_driver import WorkerDriver


class VllmEngine(DelegatingEngine):
    """Implements `fp8refit.driver.engine.Engine` for `vllm.LLM`, `AsyncLLM` and `VllmServer`.

    Args:
        candidate: An LLM, AsyncLLM, worker or server.

    Raises:
        UnsupportedEngineError: `candidate` is another vLLM object, reaches only a part of its experts, is too old, or has
            workers that did not load our plugin.
        EngineLostError: The server cannot be reached.
    """

    name = "vllm"
    server = VllmServer

    def __init__(self, candidate: Any) -> None:
        if isinstance(candidate, VllmServer):
            server = ServerDriver(candidate)
            super().__init__(server, ServedRanks(server))
            return
        driver = _drive(candidate)
        if driver.worker is not None:
            super().__init__(driver, LocalRanks(rank_of(driver.worker)))
            return
        assert not isinstance(driver, WorkerDriver), "it has the worker that it was made of"
        super().__init__(driver, RemoteRanks(driver))

    @classmethod
    def boot(cls, model: str) -> Any:
        """Boot an engine from a checkpoint. vLLM quantizes one that is not FP8."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        with VERSIONS.importing():
            from transformers import AutoConfig
            from vllm import LLM
        with booting(cls.name, model):
            config = AutoConfig.from_pretrained(model)
            is_quantized = getattr(config, "quantization_config", None) is not None
            return LLM(
                model=model,
                load_format="dummy",
                enforce_eager=True,
                skip_tokenizer_init=True,
                quantization=None if is_quantized else "fp8_per_block",
            )


def _drive(candidate: Any) -> SyncDriver | AsyncDriver | WorkerDriver:
    """Make the driver for an LLM, an AsyncLLM or a worker."""
    VERSIONS.check(getattr(sys.modules.get("vllm"), "__version__", ""))
    if hasattr(candidate, "model_runner"):
        check_layout(candidate.vllm_config)
        return WorkerDriver(candidate)
    is_async = is_async_client(candidate)
    engine = candidate if is_async else getattr(candidate, "llm_engine", None)
    if engine is None:
        raise UnsupportedEngineError(
            f"{type(candidate).__name__} is not a vllm.LLM, an AsyncLLM or a worker; pass the LLM itself"
        )
    check_layout(engine.vllm_config, engine.engine_core)
    method = method_of(engine.vllm_config)
    driver = (AsyncDriver if is_async else SyncDriver)(candidate, method)
    if driver.worker is None:
        check_workers(method)
    return driver
