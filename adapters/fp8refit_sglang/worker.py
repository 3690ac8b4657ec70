"""The rank's side: the `Rank` of a live model, in the process of its SGLang scheduler.

SGLang wraps its weight-update method with `serve`, which passes on requests that are not ours.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from fp8refit.config import RefitConfig
from fp8refit.driver.attach import made_once
from fp8refit.driver.lora_target import LoraTarget
from fp8refit.driver.replicas import gathered
from fp8refit.errors import EngineAsleepError, EngineBusyError, RefitError
from fp8refit.fill.plan import is_any_of
from fp8refit.live.drafts import with_draft
from fp8refit.live.slots import Inventory, Refresh, Refusal
from fp8refit.ranks.rank import Rank
from fp8refit.remote.rank_server import RankServer
from fp8refit.tracing.drafts import inventory_of_draft
from fp8refit.tracing.inventory import inventory_of
from fp8refit.tracing.twin import Twin
from fp8refit.transport.loopback import RankConnection
from fp8refit.transport.process_group import ProcessGroupExchange
from fp8refit_sglang.compat import (
    VERSIONS,
    address_in,
    is_call,
    loses_weights,
    place_in,
    receipt,
    scheduler_of,
    send_to_manager,
)
from fp8refit_sglang.drafts import Draft, draft_of
from fp8refit_sglang.kv_cache import HeldScales, read_kv_cache
from fp8refit_sglang.layout import SglangRules
from fp8refit_sglang.live_scheduler import Scheduler
from fp8refit_sglang.lora import PooledAdapters
from fp8refit_sglang.scheduler_driver import admit_again
from fp8refit_sglang.twin import twin_of

logger = logging.getLogger(__name__)

FLUSH, SET_APART = "flush", "set apart"
FLUSHED, KEPT = "flushed", "kept"

_SERVER, _RANK, _PUT_OFF = "_fp8refit_server", "_fp8refit_rank", "_fp8refit_put_off"


def serve(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Answer a driver, if the request is ours. Never raises: an exception from a scheduler ends the engine."""
    if not is_call(request):
        return original(manager, request)
    scheduler = Scheduler(scheduler_of(manager))
    if scheduler.num_later_stages:
        setattr(scheduler.itself, _PUT_OFF, [scheduler.num_later_stages, request])
        return None
    return _answer(scheduler, request)


def answer_late(scheduler: Any) -> None:
    """Called before a scheduler takes requests: answer a driver, if that was put off.

    A stage of a pipeline passes requests on after it took them, and what comes out at the end a step later. So each stage has
    to make one step more than the next one.
    """
    put_off = getattr(scheduler, _PUT_OFF, None)
    if put_off is None:
        return
    put_off[0] -= 1
    if not put_off[0]:
        delattr(scheduler, _PUT_OFF)
        send_to_manager(scheduler, _answer(Scheduler(scheduler), put_off[1]), put_off[1])


def _answer(scheduler: Scheduler, request: Any) -> Any:
    try:
        _converse(scheduler, address_in(request), place_in(request))
    except RefitError as error:
        logger.warning("the driver of a refit is gone: %s", error)
        return receipt(success=False, message=str(error))
    except Exception as error:
        logger.exception("a driver could not be answered")
        return receipt(success=False, message=f"{type(error).__name__}: {error}")
    return receipt(success=True, message="")


def note_sleep(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Wraps the scheduler method that releases memory."""
    scheduler = scheduler_of(manager)
    if scheduler is not None and loses_weights(request, scheduler):
        rank_of(Scheduler(scheduler)).target.forget_values()
    return original(manager, request)


def _converse(scheduler: Scheduler, address: str, place: str | None) -> None:
    """Answer what the driver at `address` says to one rank.

    Args:
        scheduler: Of the rank.
        address: Where the driver listens.
        place: A `Gathering`, if this rank shall vote with those of other replicas from now on.

    Raises:
        RankFailedError: The driver is gone.
    """
    if place is not None:
        before: RankServer | None = getattr(scheduler.itself, _SERVER, None)
        setattr(scheduler.itself, _SERVER, gathered(lambda: rank_of(scheduler), place, scheduler.rank, before=before))
    server = made_once(scheduler.itself, _SERVER, lambda: RankServer(lambda: rank_of(scheduler)))
    connection = RankConnection(address, scheduler.rank, timeout_s=RefitConfig().timeout_s)
    try:
        for message in connection.messages():
            if message == FLUSH:
                connection.answer(FLUSHED if scheduler.flush() else KEPT)
            elif message == SET_APART:
                scheduler.set_apart()
                connection.answer(FLUSHED)
            else:
                connection.answer(server.handle(message))
    finally:
        connection.close()


def rank_of(scheduler: Scheduler) -> Rank:
    """The `Rank` of `scheduler`: always the same one, whoever drives it."""
    return made_once(scheduler.itself, _RANK, lambda: _make_rank(scheduler))


def _make_rank(scheduler: Scheduler) -> Rank:
    import sglang

    VERSIONS.check(sglang.__version__)
    model = SchedulerModel(scheduler)
    target = LoraTarget(
        model.read_inventory,
        memory=PooledAdapters(scheduler),
        device=next(scheduler.model.parameters()).device,
        engine="sglang",
        versions={"sglang": sglang.__version__, "torch": torch.__version__},
        check_engine=model.check_ready,
        on_commit=partial(admit_again, scheduler.itself),
        has_constants=not scheduler.has_dummy_weights,
    )
    return Rank(target, ProcessGroupExchange(scheduler.process_group) if scheduler.num_ranks > 1 else None)


class SchedulerModel:
    """The live model of one rank.

    Args:
        scheduler: A scheduler whose model is loaded.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._scales = HeldScales(is_noise=scheduler.has_dummy_weights)

    @cached_property
    def _twin(self) -> Twin | Refusal:
        scheduler = self._scheduler
        return twin_of(scheduler.model_config, scheduler.load_config, num_ranks=scheduler.num_ranks)

    @cached_property
    def _draft(self) -> Draft | Refusal | None:
        return draft_of(self._scheduler)

    @cached_property
    def _twin_of_draft(self) -> Twin | Refusal:
        draft, beside = self._draft, self._twin.naming.beside if isinstance(self._twin, Twin) else ()
        assert isinstance(draft, Draft), f"{draft=}"
        configs, num_ranks = (draft.model_config, draft.load_config), self._scheduler.num_ranks
        return twin_of(*configs, num_ranks=num_ranks, draft=draft, is_beside=is_any_of(beside))

    def check_ready(self) -> None:
        """Refuse to write weights that are asleep, or that SGLang itself is updating.

        Raises:
            EngineAsleepError: The weights are asleep.
            EngineBusyError: A weight-update session is open.
        """
        if "weights" in self._scheduler.sleeping_tags:
            raise EngineAsleepError(
                'the weights are asleep; call resume_memory_occupation(tags=["weights"]) before refit'
            )
        if self._scheduler.has_open_session:
            raise EngineBusyError(
                "an update of weights by SGLang itself is in progress; call end_weight_update(), then refit"
            )

    def read_inventory(self) -> Inventory:
        """List the model's slots, what cannot be refitted, and what must be refreshed after a write."""
        scheduler, network = self._scheduler, self._scheduler.model
        has_noise, draft = scheduler.has_dummy_weights, self._draft
        drafts = (draft.network,) if isinstance(draft, Draft) else ()
        inventory = inventory_of(network, SglangRules(network), self._twin, has_noise=has_noise, apart=drafts)
        refusals = inventory.refusals
        if isinstance(draft, Refusal):
            refusals += (draft,)
        if scheduler.is_multimodal:
            reason = "caches encoder outputs of earlier requests"
            refusals += (Refusal(module="multimodal model", reason=reason, remedy="Boot with enable_multimodal=False"),)
        # Sleep discards the KV scales, and a dummy boot fills them with noise.
        self._scales.read(network, *drafts)
        refreshes = (*inventory.refreshes, Refresh(name="KV scales", run=self._scales.restore))
        kv = read_kv_cache(scheduler, self._scales)
        inventory = replace(inventory, kv=kv, refusals=refusals, refreshes=refreshes)
        if not isinstance(draft, Draft):
            return inventory
        own, shared = inventory_of_draft(draft, self._twin_of_draft, SglangRules(draft.network), network, inventory)
        return with_draft(inventory, own, shared=shared)
