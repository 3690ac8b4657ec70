"""The worker's side: the `Rank` of a live model, in the process of its vLLM worker.

vLLM calls `register` in every process, through the entry-point group `vllm.general_plugins`. It adds two methods to the
worker class and two to the engine core. Without plugins, `worker_extension_cls="fp8refit_vllm.worker.WorkerExtension"`
adds the first of them under another name.
"""

import os
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from fp8refit.driver.attach import hold, made_once
from fp8refit.driver.drop_in import DropInOptions
from fp8refit.driver.lora_target import LoraTarget
from fp8refit.driver.replicas import gathered
from fp8refit.errors import UnsupportedEngineError
from fp8refit.fill.plan import is_any_of
from fp8refit.live.drafts import with_draft
from fp8refit.live.slots import Inventory, Refresh, Refusal
from fp8refit.ranks.rank import Rank
from fp8refit.remote.rank_server import RankServer
from fp8refit.tracing.inventory import inventory_of
from fp8refit.tracing.twin import Twin
from fp8refit.transport.process_group import ProcessGroupExchange
from fp8refit.transport.shared_flag import SharedFlag
from fp8refit.transport.vote import Group
from fp8refit_vllm import drop_in
from fp8refit_vllm.activations import read_activation_scales, restore_activation_scales
from fp8refit_vllm.compat import (
    DROP_IN,
    NEEDED,
    VERSIONS,
    draft_method,
    engine_process_group,
    has_dummy_weights,
    on_deep_sleep,
    register_transfer,
)
from fp8refit_vllm.core import CORE_METHOD, FREEZE_METHOD, SET_APART_METHOD, carry_out
from fp8refit_vllm.core_compat import add_to_core, freeze_in_core, on_core_start, raise_refusals, set_apart_in_core
from fp8refit_vllm.drafts import Draft, draft_of, read_boot_values, read_draft
from fp8refit_vllm.eplb import ExpertPlaces, check_mover, end_moves
from fp8refit_vllm.kv_cache import read_kv_cache, reset_kv_scales
from fp8refit_vllm.layout import VllmRules
from fp8refit_vllm.lora import WorkerAdapters, watch_loads
from fp8refit_vllm.twin import twin_of
from fp8refit_vllm.watch import ADMIT_METHOD, FLAG_METHOD, admit, watch

PLUGIN_METHOD = "fp8refit_call"
EXTENSION_METHOD = "fp8refit_extension_call"
_RANK, _SERVER, _FLAG, _SCALES = "_fp8refit_rank", "_fp8refit_server", "_fp8refit_flag", "_fp8refit_scales"
_DRAFT_VALUES = "_fp8refit_draft"


def register() -> None:
    """Add our methods to vLLM's workers and engine core, and register our weight-transfer backend.

    Touches nothing in a vLLM that lacks any of what this needs.

    Raises:
        UnsupportedEngineError: It lacks something, and the drop-in is asked for.
    """
    import vllm

    is_asked = DropInOptions.read(os.environ).is_asked
    seams = (*NEEDED, DROP_IN) if is_asked else NEEDED
    if not VERSIONS.admits(vllm.__version__, seams, drop_in.logger, is_asked=is_asked):
        return
    from vllm.v1.worker.worker_base import WorkerBase

    register_transfer()
    setattr(WorkerBase, PLUGIN_METHOD, serve)
    setattr(WorkerBase, FLAG_METHOD, show_flag)
    add_to_core(CORE_METHOD, carry_out)
    add_to_core(SET_APART_METHOD, set_apart_in_core)
    add_to_core(FREEZE_METHOD, freeze_in_core)
    add_to_core(ADMIT_METHOD, admit)
    on_core_start(watch)
    raise_refusals()
    drop_in.quantize_at_boot()


def __getattr__(name: str) -> Any:
    """Return what `worker_extension_cls` names. vLLM looks it up while it boots, where an older one is refused."""
    if name != "WorkerExtension":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    VERSIONS.check(vllm.__version__)
    return Extension


class Extension:
    """For `worker_extension_cls`, as `WorkerExtension`."""

    def fp8refit_extension_call(self, message: str, gathering: str = "") -> str:
        """Answer one message of a driver. Never raises."""
        return serve(self, message, gathering)


def serve(worker: Any, message: str, gathering: str = "") -> str:
    """Answer one message of a driver. Never raises.

    Args:
        worker: The worker.
        message: The message.
        gathering: A `Gathering`, if this worker shall vote with the ranks of other replicas from now on.
    """
    if gathering:
        before: RankServer | None = getattr(worker, _SERVER, None)
        setattr(worker, _SERVER, gathered(lambda: rank_of(worker), gathering, worker.rank, before=before))
    return made_once(worker, _SERVER, lambda: RankServer(lambda: rank_of(worker))).handle(message)


def show_flag(worker: Any) -> str:
    """Called by the engine core at boot: prepare `worker` for updates and return where its flag is."""
    network = WorkerModel(worker).network
    hold(network, worker)
    on_deep_sleep(worker, lambda: rank_of(worker).target.forget_values())
    watch_loads(worker)
    drop_in.install(worker, lambda: rank_of(worker))
    made_once(worker.model_runner, _SCALES, lambda: read_activation_scales(network))
    made_once(worker.model_runner, _DRAFT_VALUES, lambda: read_boot_values(worker))
    return flag_of(worker).segment.model_dump_json()


def flag_of(worker: Any) -> SharedFlag:
    """The flag through which `worker` tells its engine core about updates."""
    return made_once(worker, _FLAG, SharedFlag.make)


def rank_of(worker: Any) -> Rank:
    """The `Rank` of `worker`, or of the worker in a wrapper: always the same one, whoever drives it.

    Raises:
        UnsupportedEngineError: The engine's ranks have no process group of their own.
    """
    return made_once(worker.model_runner, _RANK, lambda: _make_rank(worker))


def _make_rank(worker: Any) -> Rank:
    import vllm

    VERSIONS.check(vllm.__version__)
    watch_loads(worker)
    model = WorkerModel(worker)
    target = LoraTarget(
        model.read_inventory,
        memory=WorkerAdapters(worker),
        check_engine=partial(check_mover, worker),
        end_moves=partial(end_moves, worker),
        device=next(model.network.parameters()).device,
        engine="vllm",
        versions={"vllm": vllm.__version__, "torch": torch.__version__},
        on_commit=partial(_lower, worker),
        has_constants=not has_dummy_weights(worker.vllm_config.load_config),
    )
    return Rank(target, _group_of(worker))


def _lower(worker: Any) -> None:
    """Let the engine core serve requests again."""
    flag_of(worker).is_raised = False


def _group_of(worker: Any) -> Group | None:
    # Over replicas that step together; those that step alone are told that they are the only one.
    num_ranks = worker.vllm_config.parallel_config.world_size_across_dp
    if num_ranks == 1:
        return None
    process_group = engine_process_group(num_ranks)
    if process_group is None:
        raise UnsupportedEngineError(
            f"the {num_ranks} ranks of this engine have no process group of their own; leave out pipeline parallelism, "
            "or run one engine per process group"
        )
    return ProcessGroupExchange(process_group)


class WorkerModel:
    """The live model of one worker.

    Args:
        worker: A vLLM worker whose model is loaded.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._has_dummy_scales = has_dummy_weights(worker.vllm_config.load_config)
        self._places: ExpertPlaces | None = None

    @property
    def network(self) -> nn.Module:
        """The live model, without the wrappers that replay CUDA graphs."""
        network: nn.Module = self._worker.model_runner.get_model()
        return network

    @cached_property
    def _twin(self) -> Twin | Refusal:
        return twin_of(self._worker.vllm_config)

    @cached_property
    def _draft(self) -> Draft | None:
        return draft_of(self._worker)

    @cached_property
    def _twin_of_draft(self) -> Twin | Refusal:
        beside = self._twin.naming.beside if isinstance(self._twin, Twin) else ()
        return twin_of(self._worker.vllm_config, self._draft, is_any_of(beside))

    def read_inventory(self) -> Inventory:
        """List the model's slots, what cannot be refitted, and what must be refreshed after a write."""
        network, config, places = self.network, self._worker.vllm_config, self._read_places()
        has_noise = has_dummy_weights(config.load_config)
        apart = () if self._draft is None else (self._draft.network,)
        inventory = inventory_of(
            network, VllmRules(), self._twin, has_noise=has_noise, apart=apart, experts=places.held
        )
        kv = replace(read_kv_cache(self._worker, network), before_write=self._reset_dummy_scales)
        scales = {} if has_noise else getattr(self._worker.model_runner, _SCALES, {})
        restored, without = restore_activation_scales(network, scales)
        refusals, refreshes = (*inventory.refusals, *without, *places.refusals(apart)), restored + inventory.refreshes
        if self._draft is None and (method := draft_method(config)) is not None:
            reason = f"drafts tokens with its own weights ({method}), which a refit would not update"
            refusals += (Refusal(module="draft model", reason=reason, remedy="Boot without speculative_config"),)
        if self._has_dummy_scales:
            refreshes += (Refresh(name="KV scales of a dummy boot", run=self._reset_dummy_scales),)
        inventory = replace(inventory, kv=kv, refusals=refusals, refreshes=refreshes)
        inventory = replace(inventory, has_moved=places.have_moved, moving=places.moving)
        if self._draft is None:
            return inventory
        values = getattr(self._worker.model_runner, _DRAFT_VALUES, {})
        own, shared = read_draft(self._draft, self._twin_of_draft, network, inventory, values)
        return with_draft(inventory, own, shared=shared)

    def _read_places(self) -> ExpertPlaces:
        """Where experts are. If they have moved, drivers say everything again: what they send to which rank depends on it."""
        if self._places is not None and self._places.have_moved():
            self._forget_sent()
        self._places = ExpertPlaces(self._worker)
        return self._places

    def _forget_sent(self) -> None:
        server: RankServer | None = getattr(self._worker, _SERVER, None)
        if server is not None and server.orders is not None:
            server.orders.tensors.unmap()
            server.orders.receiver.leave()

    def _reset_dummy_scales(self) -> None:
        """Set KV scales to 1.0, once: a dummy boot fills them with noise, a boot from a checkpoint leaves 1.0."""
        if self._has_dummy_scales:
            reset_kv_scales(self.network)
            self._has_dummy_scales = False
