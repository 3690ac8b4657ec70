"""The SGLang adapter: refits an `Engine`, whose schedulers run in other processes, a scheduler, or a running server."""

from fp8refit_sglang.engine import SglangEngine
from fp8refit_sglang.server import SglangServer

__all__ = ["SglangEngine", "SglangServer"]
