"""The vLLM adapter: refits an `LLM`, an `AsyncLLM` (in this process or in others), a worker, or a running server."""

from fp8refit_vllm.engine import VllmEngine
from fp8refit_vllm.server import VllmServer

__all__ = ["VllmEngine", "VllmServer"]
