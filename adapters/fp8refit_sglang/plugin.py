"""What SGLang loads, in every process of an engine, from the entry-point group `sglang.srt.plugins`."""

from fp8refit_sglang.compat import IN_SCHEDULER, IN_SERVER, is_hooked, register_hook
from fp8refit_sglang.server import serve_order
from fp8refit_sglang.worker import serve

_HOOKS = {IN_SCHEDULER: serve, IN_SERVER: serve_order}


def register() -> None:
    """Let drivers reach schedulers, and servers."""
    for target, hook in _HOOKS.items():
        register_hook(target, hook)


def is_loaded() -> bool:
    """Whether SGLang has loaded it in this process, and so does in those it starts."""
    return all(is_hooked(target, hook) for target, hook in _HOOKS.items())
