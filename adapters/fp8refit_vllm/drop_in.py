"""The drop-in: vLLM's own calls that load weights into a live engine become refits. Off unless `FP8REFIT_DROP_IN=1`.

Four things are wrapped, and only for networks that the drop-in is installed on: `load_weights`; the functions around a
layerwise reload, which `reload_weights` and vLLM's weight transfer call; the transfer's `receive_weights`, and what extensions
of workers have in its place, so that all tensors are received whatever becomes of them; and the post-load processing, which
trainers call and which would replace live tensors. A failed `reload_weights` is also ended, since vLLM leaves it begun.
Installation happens after boot, so booting is unaffected. `remove` undoes everything.
"""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from fp8refit.driver.drop_in import DropIn, DropInOptions, last_report
from fp8refit.driver.installed import Installed, drop_in_of, instead_of
from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.slots import FP8_DTYPE
from fp8refit.ranks.rank import Rank
from fp8refit.tracing.stored import own_tensors
from fp8refit_vllm.compat import end_weight_update, names_parameters
from fp8refit_vllm.core_compat import steps_with_others

logger = logging.getLogger("vllm.fp8refit")

_PLUGIN = "fp8refit"
_ORIGINAL = "_fp8refit_original"
_RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
_RECEIVE = "update_weights_from_ipc"
"""Receives all buckets, in verl's, ms-swift's and checkpoint-engine's extensions of workers. If it raises after one of them,
verl's trainer waits for an answer that never comes."""
_WRAPPED = {
    "initialize_layerwise_reload": _RELOAD,
    "finalize_layerwise_reload": _RELOAD,
    "finalize_layerwise_processing": _RELOAD,
    "process_weights_after_loading": "vllm.model_executor.model_loader.utils",
    "load_checkpoint_weight_patches": "vllm.model_executor.model_loader.checkpoint_weight_patch",
}
"""Wrapped functions, all of which take the network first, and the modules that define them. Older versions lack the last."""


def options_of(config: Any) -> DropInOptions:
    """Options from the environment and from vLLM's `additional_config={"fp8refit": {...}}`, which takes precedence."""
    additional = config.additional_config
    return DropInOptions.read(os.environ, additional.get(_PLUGIN) if isinstance(additional, dict) else None)


def install(worker: Any, rank: Callable[[], Rank], options: DropInOptions | None = None) -> None:
    """Install the drop-in on a booted worker, if it is enabled and the model is block FP8. Called on every rank.

    Args:
        worker: A vLLM worker.
        rank: Returns the worker's `Rank`.
        options: By default those of the engine.

    Raises:
        UnsupportedEngineError: The model is not quantized although `FP8REFIT_QUANTIZATION` asks for it.
        RefitError: The model is block FP8 but cannot be refitted.
    """
    options = options or options_of(worker.vllm_config)
    if not options.drop_in and options.quantization is None:
        return
    network = worker.model_runner.get_model()
    is_fp8 = any(
        tensor.dtype is FP8_DTYPE for module in network.modules() for _, tensor in own_tensors(module, ("_parameters",))
    )
    asked = worker.vllm_config.model_config.quantization
    if options.quantization is not None and not is_fp8 and asked in (None, options.quantization):
        raise UnsupportedEngineError(
            f"FP8REFIT_QUANTIZATION={options.quantization} is set, but this engine holds no FP8 weights: keep fp8refit "
            "in VLLM_PLUGINS where the engine is configured, or boot it with that quantization"
        )
    if not options.drop_in or network in _installed:
        return
    if not is_fp8:
        logger.warning("fp8refit: this engine is not block FP8 and loads weights as usual; set FP8REFIT_QUANTIZATION")
        return
    if steps_with_others(worker.vllm_config):
        raise UnsupportedEngineError(
            "the drop-in cannot update experts that are spread over data-parallel replicas: ranks of one replica would wait "
            "for those of another in the middle of a step. Leave out the drop-in, and refit the AsyncLLM or the server with "
            "fp8refit.Refitter"
        )
    drop_in = DropIn(worker, rank(), options, logger)
    _installed.add(network, drop_in, drop_in.load)
    drop_in.accept()
    worker.model_runner.reload_weights = _named_and_ended(worker.model_runner.reload_weights, drop_in)
    if (transfer := getattr(worker, "weight_transfer_engine", None)) is not None:
        transfer.receive_weights = drop_in.receiving()(transfer.receive_weights)
    if (receive := getattr(worker, _RECEIVE, None)) is not None:
        setattr(worker, _RECEIVE, drop_in.receiving()(receive))
    worker.fp8refit_last_report = report
    logger.info("fp8refit: loading weights into this engine is a refit from now on")


def remove(worker: Any) -> None:
    """Restore vLLM's own methods. If a policy has only partly arrived, the engine stays dirty."""
    network = worker.model_runner.get_model()
    if network not in _installed:
        return
    del worker.model_runner.reload_weights, worker.fp8refit_last_report
    if (transfer := getattr(worker, "weight_transfer_engine", None)) is not None:
        del transfer.receive_weights
    vars(worker).pop(_RECEIVE, None)
    _installed.remove(network)


def report() -> str | None:
    """For `collective_rpc("fp8refit_last_report")`: the last refit's report as JSON; None before the first refit."""
    found = last_report()
    return None if found is None else found.model_dump_json()


def call_and_look(method: str | Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a worker, or a function of one, as vLLM does, then look for weights that it wrote past every loader.

    Raises:
        UnsupportedEngineError: There are such. Requests are refused.
    """
    call = getattr(worker, method) if isinstance(method, str) else method
    drop_in = drop_in_of(worker.model_runner.get_model())
    try:
        return call(*args, **kwargs) if isinstance(method, str) else call(worker, *args, **kwargs)
    finally:
        if drop_in is not None and names_parameters(drop_in.owner):
            drop_in.accept()
        elif drop_in is not None:
            drop_in.look(f"{call.__module__}.{getattr(call, '__qualname__', call)}")


def _wrap(undo: ExitStack) -> None:
    """Wrap the reload functions in every module that imported them."""
    for name, module in _WRAPPED.items():
        if find_spec(module) is None:
            continue
        original = getattr(import_module(module), name)
        wrapper = instead_of(original, _INSTEAD[name])
        for holder in list(sys.modules.values()):
            names = getattr(holder, "__dict__", {})
            if names.get(name) is original:
                names[name] = wrapper
                undo.callback(names.__setitem__, name, original)


_installed = Installed(_wrap)


def _named_and_ended(reload_weights: Callable[..., None], drop_in: DropIn) -> Callable[..., None]:
    """Make `reload_weights` say where it reads from, and end the policy if it fails."""

    @wraps(reload_weights)
    def wrapper(weights_iterator: Any = None, weights_path: str | None = None, *args: Any, **kwargs: Any) -> None:
        if weights_iterator is None:
            drop_in.source = weights_path or drop_in.owner.vllm_config.model_config.model
        try:
            reload_weights(weights_iterator, weights_path, *args, **kwargs)
            drop_in.accept()  # it may have named live parameters
        except BaseException:
            drop_in.close()
            raise
        finally:
            drop_in.source = None

    return wrapper


def _refuse_patches(*_: Any, **__: Any) -> NoReturn:
    """Refuse what changes single values: rounding a block takes all of its values.

    Raises:
        UnsupportedEngineError: Always. Nothing was written.
    """
    raise UnsupportedEngineError(
        "patches of single tensors or values are not taken: a refit takes whole policies. Choose another backend in "
        "weight_transfer_config (nccl, ipc or fp8refit). Nothing was written"
    )


def _look_whether_it_is_whole(drop_in: DropIn, *_: Any, **__: Any) -> None:
    """Replaces post-load processing, which a refit does not need. Warns if weights are still missing."""
    if drop_in.is_open:
        missing = drop_in.missing
        logger.warning(
            "fp8refit: post-load processing was called, but %d weights have not arrived: %s",
            len(missing),
            missing[:8],
        )


def _end(drop_in: DropIn, *_: Any, **__: Any) -> None:
    """End a policy. If that fails, end vLLM's weight update, too: repeating it must fail again, and another one must start."""
    try:
        drop_in.end()
    except BaseException:
        end_weight_update(drop_in.owner)
        raise


_INSTEAD: dict[str, Callable[..., None]] = {
    "initialize_layerwise_reload": lambda drop_in, *_, **__: drop_in.begin(),
    "finalize_layerwise_reload": _end,
    "finalize_layerwise_processing": _end,
    "process_weights_after_loading": _look_whether_it_is_whole,
    "load_checkpoint_weight_patches": _refuse_patches,
}


def quantize_at_boot() -> None:
    """Make `FP8REFIT_QUANTIZATION` the default quantization of engines configured in this process. May be repeated.

    Wraps nothing if the variable is not set. `not_quantize_at_boot` undoes it.
    """
    quantization = DropInOptions.read(os.environ).quantization
    if quantization is None:
        return
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, _ORIGINAL):
        return

    @wraps(original)
    def create_engine_config(args: Any, *positional: Any, **keywords: Any) -> Any:
        if args.quantization is None and not _is_quantized(args):
            args.quantization = quantization
            with suppress(ImportError):  # only some versions derive a second setting
                from vllm.config.quantization import resolve_quantization_config

                args.quantization_config = resolve_quantization_config(quantization, args.quantization_config)
        return original(args, *positional, **keywords)

    setattr(create_engine_config, _ORIGINAL, original)
    EngineArgs.create_engine_config = create_engine_config


def not_quantize_at_boot() -> None:
    """Undo `quantize_at_boot`."""
    from vllm.engine.arg_utils import EngineArgs

    with suppress(AttributeError):
        EngineArgs.create_engine_config = getattr(EngineArgs.create_engine_config, _ORIGINAL)


def _is_quantized(args: Any) -> bool:
    """Whether the checkpoint's configuration, or an override of it, sets a quantization."""
    from vllm.transformers_utils.config import get_config

    overrides = args.hf_overrides if isinstance(args.hf_overrides, dict) else {}
    config = get_config(args.hf_config_path or args.model, args.trust_remote_code, args.revision, args.code_revision)
    return bool(overrides.get("quantization_config") or getattr(config, "quantization_config", None))
