"""vLLM's own ways to load weights into a live engine, carried out by `fp8refit.update`. Off unless `FP8REFIT_DROP_IN=1`.

The only file that wraps methods of vLLM's. What is wrapped, on the network of each engine that is dropped into and on no other:
`load_weights`, the functions around a layerwise reload (`reload_weights` and vLLM's weight transfer go through them), and the
processing after loading, which trainers call and which would replace live tensors. It is put in place when an engine has
booted, so booting is never touched, and `remove` takes all of it away.
"""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import Any
from weakref import WeakSet

from torch import nn

from fp8refit.driver.drop_in import DropIn, DropInOptions, last_report
from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.slots import FP8_DTYPE
from fp8refit.ranks.rank import Rank

logger = logging.getLogger("vllm.fp8refit")

_PLUGIN = "fp8refit"
_HELD = "_fp8refit_drop_in"
_RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
_WRAPPED = {
    "initialize_layerwise_reload": _RELOAD,
    "finalize_layerwise_reload": _RELOAD,
    "finalize_layerwise_processing": _RELOAD,
    "process_weights_after_loading": "vllm.model_executor.model_loader.utils",
}
"""Functions that take a network first, and where each is defined."""


def options_of(config: Any) -> DropInOptions:
    """What the environment says, and vLLM's `additional_config={"fp8refit": {...}}`, which wins."""
    additional = config.additional_config
    return DropInOptions.read(os.environ, additional.get(_PLUGIN) if isinstance(additional, dict) else None)


def install(worker: Any, rank: Callable[[], Rank]) -> None:
    """Drop into an engine that has booted, if that is wanted, and if it is block FP8. Every rank of the engine does so at once.

    Args:
        worker: One of vLLM's.
        rank: Gives the rank that it is.

    Raises:
        UnsupportedEngineError: It is not quantized as `FP8REFIT_QUANTIZATION` says.
        RefitError: It is block FP8, and cannot be refitted.
    """
    options = options_of(worker.vllm_config)
    if not options.drop_in and options.quantization is None:
        return
    network = worker.model_runner.get_model()
    is_fp8 = any(parameter.dtype is FP8_DTYPE for parameter in network.parameters())
    asked = worker.vllm_config.model_config.quantization
    if options.quantization is not None and not is_fp8 and asked in (None, options.quantization):
        raise UnsupportedEngineError(
            f"FP8REFIT_QUANTIZATION={options.quantization} is set, and this engine holds nothing in FP8: leave fp8refit in "
            "VLLM_PLUGINS where the engine is configured, or boot it with that quantization"
        )
    if not options.drop_in or of(network) is not None:
        return
    if not is_fp8:
        logger.warning("fp8refit: this engine is not block FP8, and loads weights as ever; set FP8REFIT_QUANTIZATION")
        return
    drop_in = DropIn(worker, rank(), options, logger)
    object.__setattr__(network, _HELD, drop_in)
    object.__setattr__(network, "load_weights", drop_in.load)
    worker.fp8refit_last_report = report
    _networks.add(network)
    _wrap()
    logger.info("fp8refit: weights that are loaded into this engine are refits from now on")


def remove(worker: Any) -> None:
    """Give an engine its own methods back. A policy that came in part leaves it dirty."""
    network = worker.model_runner.get_model()
    drop_in = of(network)
    if drop_in is None:
        return
    for name in (_HELD, "load_weights"):
        object.__delattr__(network, name)
    del worker.fp8refit_last_report
    _networks.discard(network)
    if not _networks:
        _unwrap()
    drop_in.close()


def of(network: Any) -> DropIn | None:
    """What is dropped into a network, which may be wrapped in what replays its graphs."""
    found = getattr(network, _HELD, None)
    return found if isinstance(found, DropIn) else None


def report() -> str | None:
    """For `collective_rpc("fp8refit_last_report")`: the report of the last policy as JSON; None before the first."""
    found = last_report()
    return None if found is None else found.model_dump_json()


_networks: WeakSet[nn.Module] = WeakSet()
"""Those of this process that are dropped into. While there is any, the functions around a reload are wrapped."""
_replaced: list[tuple[dict[str, Any], str, Any]] = []


def _wrap() -> None:
    """Wrap the functions around a reload, if they are not, wherever they were imported to."""
    if _replaced:
        return
    for name, module in _WRAPPED.items():
        original = getattr(import_module(module), name, None)
        if original is None:
            continue
        wrapper = _wrapper_of(original, _INSTEAD[name])
        for holder in list(sys.modules.values()):
            names = getattr(holder, "__dict__", {})
            if names.get(name) is original:
                names[name] = wrapper
                _replaced.append((names, name, original))


def _unwrap() -> None:
    """Give all of them back."""
    for names, name, original in _replaced:
        names[name] = original
    _replaced.clear()


def _wrapper_of(original: Callable[..., Any], instead: Callable[[DropIn], None]) -> Callable[..., Any]:
    @wraps(original)
    def wrapper(model: Any, *args: Any, **kwargs: Any) -> Any:
        drop_in = of(model)
        return original(model, *args, **kwargs) if drop_in is None else instead(drop_in)

    return wrapper


def _look_whether_it_is_whole(drop_in: DropIn) -> None:
    """Nothing is left to process. Who calls this thinks that all of it came."""
    if drop_in.is_open:
        missing = drop_in.missing
        logger.warning(
            "fp8refit: weights are processed as if all had been loaded, and %d have not come: %s",
            len(missing),
            missing[:8],
        )


_INSTEAD: dict[str, Callable[[DropIn], None]] = {
    "initialize_layerwise_reload": DropIn.begin,
    "finalize_layerwise_reload": DropIn.end,
    "finalize_layerwise_processing": DropIn.end,
    "process_weights_after_loading": _look_whether_it_is_whole,
}


def quantize_at_boot() -> None:
    """Have engines of this process be quantized as `FP8REFIT_QUANTIZATION` says, where nothing else says how. May be repeated.

    Where it is not set, nothing is wrapped. `not_quantize_at_boot` undoes it.
    """
    from vllm.engine.arg_utils import EngineArgs

    quantization = DropInOptions.read(os.environ).quantization
    original = EngineArgs.create_engine_config
    if quantization is None or hasattr(original, _HELD):
        return

    @wraps(original)
    def create_engine_config(args: Any, *positional: Any, **keywords: Any) -> Any:
        if args.quantization is None and not _is_quantized(args):
            args.quantization = quantization
            with suppress(ImportError):  # what else is derived from it, where something is
                from vllm.config.quantization import resolve_quantization_config

                args.quantization_config = resolve_quantization_config(quantization, args.quantization_config)
        return original(args, *positional, **keywords)

    setattr(create_engine_config, _HELD, original)
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def not_quantize_at_boot() -> None:
    """Undo `quantize_at_boot`."""
    from vllm.engine.arg_utils import EngineArgs

    with suppress(AttributeError):
        EngineArgs.create_engine_config = getattr(EngineArgs.create_engine_config, _HELD)  # type: ignore[method-assign]


def _is_quantized(args: Any) -> bool:
    """Whether a checkpoint, or what overrides its configuration, says how it is quantized."""
    from vllm.transformers_utils.config import get_config

    overrides = args.hf_overrides if isinstance(args.hf_overrides, dict) else {}
    config = get_config(args.hf_config_path or args.model, args.trust_remote_code, args.revision, args.code_revision)
    return bool(overrides.get("quantization_config") or getattr(config, "quantization_config", None))
