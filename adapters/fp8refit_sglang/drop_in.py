"""The drop-in: SGLang's own calls that load weights into a live engine become refits. Off unless `FP8REFIT_DROP_IN=1`.

It wraps `load_weights` of each scheduler's network, and SGLang's code around it that marks begin and end of an update
(`begin_weight_update`, loading from disk). Installation happens when a scheduler receives its first requests, so
booting is unaffected. `remove` undoes everything.
"""

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

from torch import nn

from fp8refit.driver.drop_in import DropIn, DropInOptions
from fp8refit.errors import RefitError
from fp8refit.live.slots import FP8_DTYPE
from fp8refit_sglang.compat import close_session, has_sessions, weights_receipt
from fp8refit_sglang.live_scheduler import Scheduler
from fp8refit_sglang.worker import rank_of

logger = logging.getLogger("sglang.fp8refit")

IN_UPDATES = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
"""The class whose methods handle weight updates in a scheduler. An exception from them would end the engine."""
ANSWERED = (
    "begin_weight_update",
    "end_weight_update",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
)
SEAMS = (
    *(f"{IN_UPDATES}.{name}" for name in ANSWERED[2:]),
    "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess",
)
"""What the drop-in reaches for in every version, beside what the plugin does."""
_HELD = "_fp8refit_drop_in"
_networks: WeakSet[nn.Module] = WeakSet()
"""Networks in this process with the drop-in. SGLang's loader stays wrapped while there are any."""
_replaced: dict[str, Any] = {}


def hooks() -> dict[str, Callable[..., Any]]:
    """What makes SGLang answer a failed update with its error."""
    return {f"{IN_UPDATES}.{name}": _answer_of(name) for name in (ANSWERED if has_sessions() else ANSWERED[2:])}


def _answer_of(name: str) -> Callable[..., Any]:
    def answer(original: Callable[..., Any], manager: Any, request: Any) -> Any:
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
    if hasattr(network, _HELD):
        return
    if not any(parameter.dtype is FP8_DTYPE for parameter in network.parameters()):
        logger.warning("fp8refit: this engine is not block FP8 and loads weights as usual")
        return
    load: Callable[..., set[str]]
    try:
        drop_in = DropIn(scheduler, rank_of(Scheduler(scheduler)), options, logger)
        load = drop_in.load
    except RefitError as error:
        logger.error("fp8refit: %s", error)
        drop_in, load = None, _refuse_with(error)
    object.__setattr__(network, _HELD, drop_in)
    object.__setattr__(network, "load_weights", load)
    _networks.add(network)
    _wrap()


def remove(scheduler: Any) -> None:
    """Restore SGLang's own methods. If a policy has only partly arrived, the engine stays dirty."""
    network = Scheduler(scheduler).model
    if not hasattr(network, _HELD):
        return
    drop_in = of(network)
    for name in (_HELD, "load_weights"):
        object.__delattr__(network, name)
    _networks.discard(network)
    if not _networks:
        _unwrap()
    if drop_in is not None:
        drop_in.close()


def of(network: Any) -> DropIn | None:
    """The network's `DropIn`, if installed."""
    found = getattr(network, _HELD, None)
    return found if isinstance(found, DropIn) else None


def _refuse_with(error: RefitError) -> Callable[..., set[str]]:
    def refuse(weights: Iterable[Any]) -> set[str]:
        raise error

    return refuse


def _load_to_the_end(drop_in: DropIn, model: Any, weights: Iterable[Any], *_: Any) -> None:
    """Load the rest of a policy and end the update, also after an error: SGLang does not end it then."""
    try:
        drop_in.load(weights)
    except BaseException:
        drop_in.close()
        raise
    drop_in.end()


def _load_whole(drop_in: DropIn, model: Any, weights: Iterable[Any], *_: Any) -> None:
    drop_in.begin()
    _load_to_the_end(drop_in, model, weights)


_INSTEAD: dict[str, Callable[..., None]] = {
    "restore_weights_before_loading": lambda drop_in, *_: drop_in.begin(),
    "load_weights_and_postprocess": _load_to_the_end,
    "postprocess_weights": lambda drop_in, *_: drop_in.end(),
}
_INSTEAD_BEFORE: dict[str, Callable[..., None]] = {"load_weights_and_postprocess": _load_whole}
"""For versions without the other two functions (0.5.15)."""


def _wrap() -> None:
    """Wrap SGLang's loader, unless that is done already."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    has_both = all(hasattr(DefaultModelLoader, name) for name in _INSTEAD)
    for name, instead in (_INSTEAD if has_both else _INSTEAD_BEFORE).items():
        if name not in _replaced:
            original = DefaultModelLoader.__dict__[name]
            _replaced[name] = original
            setattr(DefaultModelLoader, name, staticmethod(_wrapper_of(original.__func__, instead)))


def _unwrap() -> None:
    """Restore SGLang's loader."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    for name, original in _replaced.items():
        setattr(DefaultModelLoader, name, original)
    _replaced.clear()


def _wrapper_of(original: Callable[..., Any], instead: Callable[..., None]) -> Callable[..., Any]:
    def wrapper(model: Any, *args: Any, **kwargs: Any) -> Any:
        drop_in = of(model)
        return original(model, *args, **kwargs) if drop_in is None else instead(drop_in, model, *args, **kwargs)

    return wrapper
