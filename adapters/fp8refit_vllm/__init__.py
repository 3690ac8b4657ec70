"""fp8refit on vLLM: an `LLM` or `AsyncLLM`, with its engine in this process or in others, or a server."""

from fp8refit_vllm.engine import VllmEngine
from fp8refit_vllm.server import VllmServer

__all__ = ["VllmEngine", "VllmServer"]
