"""Which of vLLM's clients can be refitted, and by which method of its workers."""

from typing import Any

from fp8refit.errors import UnsupportedEngineError
from fp8refit_vllm.compat import is_async_client, loads_plugin, num_api_servers
from fp8refit_vllm.worker import EXTENSION_METHOD, PLUGIN_METHOD, WorkerExtension

PLUGIN = "fp8refit"
"""Name of our entry points among vLLM's plugins."""
_EXTENSION = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"


def method_of(config: Any) -> str:
    """The method that the workers of an engine have for us."""
    return EXTENSION_METHOD if config.parallel_config.worker_extension_cls == _EXTENSION else PLUGIN_METHOD


def check_layout(config: Any) -> None:
    """Refuse an engine of which one client sees a part.

    Raises:
        UnsupportedEngineError: It runs data-parallel replicas.
    """
    num_replicas = config.parallel_config.data_parallel_size
    if num_replicas > 1:
        raise UnsupportedEngineError(
            f"the engine runs {num_replicas} data-parallel replicas behind one client, which hears from "
            "one of them; start one engine a replica, and refit each"
        )


def check_workers(method: str) -> None:
    """Refuse an engine whose workers, in other processes, do not have our method.

    Raises:
        UnsupportedEngineError: They do not load our plugin.
    """
    if method == PLUGIN_METHOD and not loads_plugin(PLUGIN):
        raise UnsupportedEngineError(
            "the workers of this engine run in other processes, where vLLM does not load fp8refit's plugin: install fp8refit "
            f'(a path alone has no entry points), leave it in VLLM_PLUGINS, or boot the engine with worker_extension_cls="'
            f'{_EXTENSION}"'
        )


def check_server(client: Any) -> None:
    """Refuse a server that one of its processes cannot speak for.

    Args:
        client: What its requests go through.

    Raises:
        UnsupportedEngineError: Several processes take its requests, or its engine cannot be refitted.
    """
    if client is None or not is_async_client(client):
        raise UnsupportedEngineError(f"this server has no engine to refit ({type(client).__name__})")
    num_processes = num_api_servers(client.vllm_config)
    if num_processes > 1:
        raise UnsupportedEngineError(
            f"{num_processes} processes take the requests of this server, and do not hear from each other that a refit is "
            "under way; start it with --api-server-count 1"
        )
    check_layout(client.vllm_config)
