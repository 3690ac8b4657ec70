"""Checks which vLLM clients can be refitted, and picks the worker method to call."""

from pkgutil import resolve_name
from typing import Any

from fp8refit.errors import UnsupportedEngineError
from fp8refit_vllm.compat import WORKER, is_async_client, keeping_connectors, loads_plugin
from fp8refit_vllm.core_compat import cores_of, steps_with_others
from fp8refit_vllm.worker import EXTENSION_METHOD, PLUGIN_METHOD

PLUGIN = "fp8refit"
"""Name of our vLLM plugin entry points."""
_EXTENSION = "fp8refit_vllm.worker.WorkerExtension"


def method_of(config: Any) -> str:
    """Name of the worker method that takes our messages."""
    return EXTENSION_METHOD if config.parallel_config.worker_extension_cls == _EXTENSION else PLUGIN_METHOD


def check_connectors(config: Any) -> None:
    """Refuse an engine of which something outside keeps what the old policy has computed.

    Raises:
        UnsupportedEngineError: It does.
    """
    if kept := keeping_connectors(getattr(config, "kv_transfer_config", None)):
        raise UnsupportedEngineError(
            f"this engine would give KV of the old policy to later requests: vLLM cannot make {', '.join(kept)} drop what it "
            "keeps; boot it without, or with OffloadingConnector in host memory alone"
        )
    if getattr(config, "ec_transfer_config", None) is not None:
        raise UnsupportedEngineError(
            "this engine would give what the old policy's encoder has computed to later requests, which vLLM keeps outside; "
            "boot it without ec_transfer_config"
        )


def check_layout(config: Any, client: Any = None) -> None:
    """Refuse an engine whose client sees only a part of it, or that would serve KV of the old policy.

    Args:
        config: The engine's `VllmConfig`.
        client: The client of its cores; None for a worker.

    Raises:
        UnsupportedEngineError: Its experts are spread over replicas that the client does not reach; or a KV connector keeps KV.
    """
    check_connectors(config)
    num_replicas = config.parallel_config.data_parallel_size
    if steps_with_others(config) and len(cores_of(client)) < num_replicas:
        raise UnsupportedEngineError(
            f"the experts of this engine are spread over {num_replicas} data-parallel replicas, of which this process reaches "
            "only a part: boot it as one AsyncLLM or one server with data_parallel_size, without data_parallel_rank and "
            "without --data-parallel-hybrid-lb"
        )


def check_workers(method: str) -> None:
    """Refuse an engine whose workers, in other processes, lack our method.

    Raises:
        UnsupportedEngineError: The workers do not load our plugin.
    """
    is_there = method != PLUGIN_METHOD or (loads_plugin(PLUGIN) and hasattr(resolve_name(WORKER), PLUGIN_METHOD))
    if not is_there:
        raise UnsupportedEngineError(
            "the workers of this engine run in other processes, where vLLM does not load fp8refit's plugin: install fp8refit "
            f'(a path alone has no entry points), leave it in VLLM_PLUGINS, or boot the engine with worker_extension_cls="'
            f'{_EXTENSION}". If vLLM loads it, the log says what this vLLM lacks'
        )


def check_server(client: Any) -> None:
    """Refuse a server that has no engine we can refit.

    Args:
        client: The server's engine client.

    Raises:
        UnsupportedEngineError: The engine cannot be refitted.
    """
    if client is None or not is_async_client(client):
        raise UnsupportedEngineError(f"this server has no engine to refit ({type(client).__name__})")
    check_layout(client.vllm_config, client.engine_core)
