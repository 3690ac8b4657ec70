"""SGLang's implementation of `Engine`: picks the driver for an `sglang.Engine`, a scheduler or a server."""

import json
import sys
from typing import Any

from fp8refit.driver.adapters import booting
from fp8refit.driver.engine import DelegatingEngine
from fp8refit.driver.local_ranks import LocalRanks
from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.formats import quantization_config
from fp8refit.remote.ranks import RemoteRanks
from fp8refit.remote.servers.server_driver import ServedRanks, ServerDriver
from fp8refit_sglang.compat import OF_STAGES, VERSIONS, num_stages, why_not_refitted
from fp8refit_sglang.controls import TokenizerControls
from fp8refit_sglang.driver import NOT_LOADED, Driver
from fp8refit_sglang.live_scheduler import Scheduler
from fp8refit_sglang.plugin import is_loaded
from fp8refit_sglang.scheduler_driver import SchedulerDriver
from fp8refit_sglang.server import SglangServer
from fp8refit_sglang.worker import rank_of


class SglangEngine(DelegatingEngine):
    """Implements `fp8refit.driver.engine.Engine` for `sglang.Engine`, `SglangServer` and a scheduler.

    Args:
        candidate: The engine, the server, or the scheduler.

    Raises:
        UnsupportedEngineError: `candidate` is another SGLang object, is too old, has a layout that cannot be refitted,
            or did not load our plugin.
        EngineLostError: The server cannot be reached.
    """

    name = "sglang"
    server = SglangServer

    def __init__(self, candidate: Any) -> None:
        if isinstance(candidate, SglangServer):
            _check_arguments(candidate.arguments())
            server = ServerDriver(candidate)
            super().__init__(server, ServedRanks(server))
        elif hasattr(candidate, "tp_worker"):
            _check_arguments(candidate.server_args)
            if num_stages(candidate.server_args) > 1:
                raise UnsupportedEngineError(OF_STAGES)
            super().__init__(SchedulerDriver(candidate), LocalRanks(rank_of(Scheduler(candidate))))
        else:
            driver = Driver(_controls_of(candidate))
            super().__init__(driver, RemoteRanks(driver))

    @classmethod
    def boot(cls, model: str) -> Any:
        """Boot an engine from a checkpoint. One that is not FP8 is booted as if it were block FP8."""
        with VERSIONS.importing():
            import sglang
            from transformers import AutoConfig
        with booting(cls.name, model):
            is_quantized = getattr(AutoConfig.from_pretrained(model), "quantization_config", None) is not None
            overrides = {} if is_quantized else {"quantization_config": quantization_config()}
            return sglang.Engine(
                model_path=model,
                load_format="dummy",
                skip_tokenizer_init=True,
                disable_cuda_graph=True,
                json_model_override_args=json.dumps(overrides),
            )


def _controls_of(candidate: Any) -> TokenizerControls:
    """The controls of an engine in this process.

    Raises:
        UnsupportedEngineError: See `SglangEngine`.
    """
    if not hasattr(candidate, "tokenizer_manager") or not hasattr(candidate, "server_args"):
        raise UnsupportedEngineError(f"{type(candidate).__name__} is not an sglang.Engine; pass the engine itself")
    _check_arguments(candidate.server_args)
    if not is_loaded():
        raise UnsupportedEngineError(NOT_LOADED)
    return TokenizerControls(candidate.tokenizer_manager, candidate.loop)


def _check_arguments(arguments: Any) -> None:
    version: Any = getattr(arguments, "version", None) or getattr(sys.modules.get("sglang"), "__version__", "")
    VERSIONS.check(version)
    reason = why_not_refitted(arguments)
    if reason is not None:
        raise UnsupportedEngineError(f"this engine cannot be refitted: {reason}")
