"""fp8refit on SGLang: an `Engine` whose schedulers run in processes of their own, or a server on this host."""

from fp8refit_sglang.engine import SglangEngine
from fp8refit_sglang.server import SglangServer

__all__ = ["SglangEngine", "SglangServer"]
