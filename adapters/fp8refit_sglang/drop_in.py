"""The drop-in: SGLang's own calls that load weights into a live engine become refits. Off unless `FP8REFIT_DROP_IN=1`.

It wraps `load_weights` of each scheduler's network, and SGLang's code around it that marks begin and end of an update
(`begin_weight_update`, loading from disk). Installation happens when a scheduler receives its first requests, so
booting is unaffected. `remove` undoes everything.
"""

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from fp8refit.driver.drop_in import DropIn, DropInOptions
from fp8refit.driver.installed import Installed, drop_in_of, instead_of
from fp8refit.errors import RefitError, UnsupportedEngineError
from fp8refit.live.slots import FP8_DTYPE
from fp8refit_sglang.compat import OF_STAGES, close_session, has_sessions, in_updater, num_stages, weights_receipt
from fp8refit_sglang.drafts import Draft, draft_of
from fp8refit_sglang.live_scheduler import Scheduler
from fp8refit_sglang.worker import rank_of

logger = logging.getLogger("sglang.fp8refit")

ANSWERED = (
    "begin_weight_update",
    "end_weight_update",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
)
"""Methods for weight updates in a scheduler. An exception from them would end the engine."""

_HAS_DRAFT = (
    "SGLang's own updates load weights into the draft, too, past fp8refit; refit with `Refitter`, or boot without "
    "speculative_algorithm"
)


def hooks() -> dict[str, Callable[..., Any]]:
    """What makes SGLang answer a failed update with its error."""
    return {in_updater(name): _answer_of(name) for name in (ANSWERED if has_sessions() else ANSWERED[2:])}


def _answer_of(name: str) -> Callable[..., Any]:
    def answer(original: Callable[..., Any], manager: Any, request: Any) -> Any:
        if name == "begin_weight_update" and _installed:
            close_session(manager)  # of a trainer that is gone: its policy did not become whole
        try:
            return original(manager, request)
        except RefitError as error:
            logger.error("%s: %s", name, error)
            if not name.startswith("update"):
                close_session(manager)
            return weights_receipt(name, str(error))

    return answer


def install(scheduler: Any) -> None:
    """Install the drop-in on a booted scheduler, if it is enabled and the model is block FP8. Called on every rank.

    If the engine cannot be refitted, the next weight update raises the reason: raising it here would end the engine.
    """
    options = DropInOptions.read(os.environ)
    if not options.drop_in:
        return
    network = Scheduler(scheduler).model
    if network in _installed:
        return
    if not any(parameter.dtype is FP8_DTYPE for parameter in network.parameters()):
        logger.warning("fp8refit: this engine is not block FP8 and loads weights as usual")
        return
    load: Callable[..., set[str]]
    try:
        if isinstance(draft_of(Scheduler(scheduler)), Draft):
            raise UnsupportedEngineError(_HAS_DRAFT)
        if num_stages(scheduler.server_args) > 1:  # a vote now would hold up a stage that the next one waits for
            raise UnsupportedEngineError(OF_STAGES)
        drop_in = DropIn(scheduler, rank_of(Scheduler(scheduler)), options, logger)
        load = drop_in.load
    except RefitError as error:
        logger.error("fp8refit: %s", error)
        drop_in, load = None, _refuse_with(error)
    _installed.add(network, drop_in, load)


def note_flush(scheduler: Any, requests: Iterable[Any]) -> None:
    """End what has come of a policy when a trainer drops the caches: slime does so before each one, verl and NeMo RL after."""
    drop_in = drop_in_of(Scheduler(scheduler).model)
    if drop_in is not None and any(type(request).__name__ == "FlushCacheReqInput" for request in requests):
        drop_in.cut()


def remove(scheduler: Any) -> None:
    """Restore SGLang's own methods. If a policy has only partly arrived, the engine stays dirty."""
    network = Scheduler(scheduler).model
    if network in _installed:
        _installed.remove(network)


def _refuse_with(error: RefitError) -> Callable[..., set[str]]:
    def refuse(weights: Iterable[Any]) -> set[str]:
        raise error

    return refuse


def _load_to_the_end(drop_in: DropIn, weights: Iterable[Any], *_: Any) -> None:
    """Load the rest of a policy and end the update, also after an error: SGLang does not end it then."""
    try:
        drop_in.load(weights)
    except BaseException:
        drop_in.close()
        raise
    drop_in.end()


def _load_whole(drop_in: DropIn, weights: Iterable[Any], *_: Any) -> None:
    drop_in.begin()
    _load_to_the_end(drop_in, weights)


_INSTEAD: dict[str, Callable[..., None]] = {
    "restore_weights_before_loading": lambda drop_in, *_: drop_in.begin(),
    "load_weights_and_postprocess": _load_to_the_end,
    "postprocess_weights": lambda drop_in, *_: drop_in.end(),
}
_INSTEAD_BEFORE: dict[str, Callable[..., None]] = {"load_weights_and_postprocess": _load_whole}
"""For versions without the other two functions (0.5.15)."""


def _wrap(undo: ExitStack) -> None:
    """Wrap SGLang's loader."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    has_both = all(hasattr(DefaultModelLoader, name) for name in _INSTEAD)
    for name, instead in (_INSTEAD if has_both else _INSTEAD_BEFORE).items():
        original = DefaultModelLoader.__dict__[name]
        setattr(DefaultModelLoader, name, staticmethod(instead_of(original.__func__, instead)))
        undo.callback(setattr, DefaultModelLoader, name, original)


_installed = Installed(_wrap)
