"""The plugin that SGLang loads in every process of an engine, from the entry-point group `sglang.srt.plugins`."""

import os
from collections.abc import Callable
from typing import Any

from fp8refit.driver.drop_in import DropInOptions
from fp8refit.errors import UnsupportedEngineError
from fp8refit_sglang import drop_in
from fp8refit_sglang.compat import (
    ADAPTERS,
    DROP_IN,
    IN_ADMISSION,
    IN_ATTENTION,
    IN_LORA,
    IN_SCHEDULER,
    IN_SERVER,
    IN_SLEEP,
    IN_START,
    NEEDED,
    VERSIONS,
    is_hooked,
    register_hook,
)
from fp8refit_sglang.kv_cache import give_scales
from fp8refit_sglang.lora import note_load
from fp8refit_sglang.scheduler_driver import admit, is_known
from fp8refit_sglang.server import open_door, refuse_older
from fp8refit_sglang.worker import answer_late, note_sleep, serve


def take_in(original: Callable[..., Any], scheduler: Any, requests: list[Any]) -> Any:
    """Wraps the scheduler method that receives requests."""
    if not is_known(scheduler):
        drop_in.install(scheduler)
    answer_late(scheduler)
    if requests:
        drop_in.note_flush(scheduler, requests)
    return admit(original, scheduler, requests)


_DOORS: dict[str, Callable[..., Any]] = {
    IN_SCHEDULER: serve,
    IN_ADMISSION: take_in,
    IN_SERVER: refuse_older,
    IN_START: open_door,
}


def register() -> None:
    """Register the hooks that let drivers reach schedulers and servers, and give every FP8 KV cache scales.

    Registers nothing in an SGLang that lacks any of what this needs.

    Raises:
        SystemExit: It lacks something, and the drop-in is asked for. SGLang serves on after any other error of a plugin.
    """
    import sglang

    is_asked = DropInOptions.read(os.environ).drop_in
    hooks = _DOORS | {IN_ATTENTION: give_scales, IN_SLEEP: note_sleep}
    hooks |= {IN_LORA: note_load} if ADAPTERS.missing is None else {}
    seams = (*NEEDED, DROP_IN) if is_asked else NEEDED
    try:
        if not VERSIONS.admits(sglang.__version__, seams, drop_in.logger, is_asked=is_asked):
            return
    except UnsupportedEngineError as error:
        raise SystemExit(f"FP8REFIT_DROP_IN is set, but {error}") from error
    for target, hook in (hooks | (drop_in.hooks() if is_asked else {})).items():
        register_hook(target, hook)


def is_loaded() -> bool:
    """Whether SGLang has loaded the plugin in this process, and therefore in those it starts."""
    return all(is_hooked(target, hook) for target, hook in _DOORS.items())
