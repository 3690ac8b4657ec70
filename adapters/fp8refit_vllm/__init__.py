"""fp8refit on vLLM: an `LLM` whose engine runs in this process."""

from fp8refit_vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
