"""Refits several engines with one broadcast: all serve the new policy, or none does."""

import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar, Unpack

import torch.distributed
from torch import Tensor
from typing_extensions import override

from fp8refit.config import Options, RefitConfig, choose_config, refuse_others
from fp8refit.driver.attach import AttachedEngine, attach_engine
from fp8refit.driver.attempt import Attempt, take_turn
from fp8refit.driver.closing import Closing
from fp8refit.driver.engine_group import EngineGroup
from fp8refit.driver.refitter import Refitter
from fp8refit.driver.router import behind_router
from fp8refit.errors import (
    EngineLostError,
    InvalidOptionError,
    InvalidSourceError,
    RefitError,
    TransportError,
    UnsupportedEngineError,
)
from fp8refit.ranks.kv.calibration import Calibration, KvScaleValues
from fp8refit.ranks.ranks import Ranks
from fp8refit.report import RefitReport
from fp8refit.sources.sharded.gather import Gathered
from fp8refit.sources.source import Manifest, StateDict
from fp8refit.transport.error_capture import ErrorCapture
from fp8refit.transport.running import run

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")
_PATIENCE = 4
"""Other ranks of the trainer wait this many times `timeout_s` for the rank that prepares and pauses the engines."""


class Broadcaster(Closing):
    """Moves several engines from policy to policy at once, by a broadcast of FP8 codes and scales to all their ranks.

    An error before the first byte is written leaves every engine serving as before. A later error leaves all of them
    dirty: they refuse requests until the next push heals them.

    Args:
        engines: What `Refitter` takes, with workers in other processes: `LLM`, `AsyncLLM`, URLs of servers. The trainer
            drives them from its rank 0; other ranks may pass nothing.
        config: Options; or pass its fields as keywords. `transport` is `"collective"`. Engines on other hosts need
            `collective.host`, an address of this host.
        group: The trainer's ranks, if there are several: each of them makes a `Broadcaster` and calls `push`. The group
            must support CPU tensors (gloo in addition to NCCL).
        on_refit: See `Refitter`. Called on the trainer's rank 0.
        on_lost: What becomes of an engine that no longer answers. `"raise"`: an `EngineLostError`. `"drop"`: the others are
            pushed to without it, in the same call if the policy can be read again.
        router: URL of vLLM's or SGLang's router. Every push begins with the servers that are behind it then, beside
            `engines`: new ones get the same policy as all others, and those that it has no more are pushed to no longer.
        **options: See `Refitter`.

    Raises:
        UnsupportedEngineError: An engine cannot be refitted by broadcast; says why.

    Examples:
        >>> broadcaster = Broadcaster([llm, "http://10.0.0.2:8000"], collective={"host": "10.0.0.1"})  # doctest: +SKIP
        >>> print(broadcaster.push(model.state_dict()))                                                # doctest: +SKIP
    """

    def __init__(
        self,
        engines: Sequence[object] = (),
        *,
        config: RefitConfig | None = None,
        group: "ProcessGroup | None" = None,
        on_refit: Callable[[RefitReport], object] = lambda _: None,
        on_lost: Literal["raise", "drop"] = "raise",
        router: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        if on_lost not in ("raise", "drop"):
            raise InvalidOptionError(f'on_lost={on_lost!r}: choose "raise" or "drop"')
        if isinstance(engines, str) or not isinstance(engines, Iterable):
            raise TypeError(f"engines is of type {type(engines).__name__}; pass a list of engines")
        self._config = choose_config(config, options).model_copy(update={"transport": "collective"})
        self._group, self._on_refit, self._on_lost, self._router = group, on_refit, on_lost, router
        self._refitter: Refitter | None = None
        self._fleet: EngineGroup | None = None
        self._engines: tuple[object, ...] = ()
        """As they were passed, in the order of the fleet."""
        self._own: tuple[object, ...] = tuple(engines)
        self._routed: set[str] = set()
        """URLs of all that the router has ever had."""
        if group is None or torch.distributed.get_rank(group) == 0:
            self._routed |= set(urls := self._behind_router())
            routed = self._reached(urls)
            fleet = EngineGroup([*self._own, *(attached for _, attached in routed)])
            self._adopt([*self._own, *(url for url, _ in routed)], fleet)

    def _adopt(self, engines: Sequence[object], fleet: EngineGroup) -> None:
        self._engines, self._fleet = tuple(engines), fleet
        self._refitter = Refitter(fleet, self._config, on_refit=self._on_refit)

    def _behind_router(self) -> tuple[str, ...]:
        """URLs of the servers that are behind the router now, except those that were passed.

        Raises:
            EngineLostError: The router does not answer.
            UnsupportedEngineError: It is no router.
        """
        if self._router is None:
            return ()
        own = {engine.rstrip("/") for engine in self._own if isinstance(engine, str)}
        return tuple(url for url in behind_router(self._router) if url not in own)

    def _reached(self, urls: Sequence[str]) -> list[tuple[object, AttachedEngine]]:
        """Servers that answer, each with what is attached to it.

        Raises:
            EngineLostError: One does not, and engines are not to be dropped.
        """
        found: list[tuple[object, AttachedEngine]] = []
        for url in urls:
            try:
                found.append((url, attach_engine(url)))
            except EngineLostError as lost:
                if self._on_lost == "raise":
                    raise
                logger.warning("%s; it is not pushed to", lost)
        return found

    async def _follow(self) -> None:
        """Push to the servers that are behind the router now, and no longer to those that were."""
        fleet = self._fleet
        if self._router is None or fleet is None:
            return
        known, now = list(zip(self._engines, fleet.attached, strict=True)), self._behind_router()
        self._routed |= set(now)
        left = self._routed.difference(now)
        kept = [(engine, own) for engine, own in known if not (isinstance(engine, str) and engine in left)]
        gone = [own for engine, own in known if isinstance(engine, str) and engine in left]
        new = self._reached([url for url in now if url not in self._engines])
        if gone or new:
            await self._form([engine for engine, _ in kept + new], [own for _, own in kept + new])
            await self._let_go(gone)

    async def _form(self, engines: Sequence[object], attached: Sequence[AttachedEngine]) -> None:
        """Push to these engines from now on, and to nothing else.

        Raises:
            EngineBusyError: A push is under way.
        """
        old, fleet = self._fleet, EngineGroup(attached)

        async def leave(_: object) -> None:
            assert old is not None, "it exists"
            old.ranks.leave()
            self._adopt(engines, fleet)

        assert old is not None, "this rank drives engines"
        await take_turn(old._fp8refit_engine, leave)

    @property
    def engines(self) -> tuple[object, ...]:
        """The engines that are pushed to, as they were passed; empty on ranks that do not drive them."""
        return self._engines

    @property
    def version(self) -> int:
        """Policy version that the engines serve; 0 on ranks of the trainer that do not drive them."""
        return self._refitter.version if self._refitter is not None else 0

    @property
    def is_dirty(self) -> bool:
        """Whether any engine holds a mixture of two policies; all of them refuse requests until the next push."""
        return self._refitter is not None and self._refitter.is_dirty

    def push(
        self,
        state_dict: StateDict,
        *,
        manifest: Manifest | None = None,
        calibration: Calibration | None = None,
        kv_scales: KvScaleValues | None = None,
        **_others: Never,
    ) -> RefitReport | None:
        """Refit every engine with `state_dict`.

        Every rank of `group` calls it, with its own shards of the same tensors in the same order. If one raises, all
        do.

        Args:
            state_dict: See `Refitter.refit`. An iterator needs a `manifest`, in whose order it is read. With `group`, a mapping
                or pairs of names and DTensors or tensors.
            manifest: See `Refitter.refit`.
            calibration: See `Refitter.refit`; every engine measures for itself.
            kv_scales: See `Refitter.refit`.

        Returns:
                The report, with the ranks of all engines numbered consecutively; None on ranks other than 0.

        Raises:
            RefitError: See `Refitter.refit`.
            TransportError: A rank did not join, died, or does not answer.
        """
        refuse_others(self.push, _others)
        steps = self.push_async(state_dict, manifest=manifest, calibration=calibration, kv_scales=kv_scales)
        return self._run(steps)

    async def push_async(
        self,
        state_dict: StateDict,
        *,
        manifest: Manifest | None = None,
        calibration: Calibration | None = None,
        kv_scales: KvScaleValues | None = None,
        **_others: Never,
    ) -> RefitReport | None:
        """`push` for asynchronous engines, awaited in the event loop that drives them."""
        refuse_others(self.push_async, _others)
        with self._opened(state_dict) as weights:
            await self._follow()
            while self._refitter is not None:
                with ErrorCapture() as failed:
                    return await self._refitter.refit_async(
                        weights, manifest=manifest, calibration=calibration, kv_scales=kv_scales
                    )
                await self._drop_or_raise(failed, weights)
        return None

    def add(
        self,
        engine: object,
        state_dict: "StateDict | None" = None,
        *,
        manifest: Manifest | None = None,
        calibration: Calibration | None = None,
        kv_scales: KvScaleValues | None = None,
    ) -> RefitReport | None:
        """Push to one more engine from now on, which was started late, or again.

        Args:
            engine: See `Broadcaster`. Not one that is pushed to already.
            state_dict: The policy that the others serve, on every rank of `group`. With it, the new engine refuses requests
                until it serves that, at their version or a later one; if another one has the same slots, the fingerprints of
                their weights must be equal. Without it, the engine serves what it does until the next push.
            manifest: See `Refitter.refit`.
            calibration: See `Refitter.refit`.
            kv_scales: See `Refitter.refit`.

        Returns:
            The report of the new engine's refit; None without a policy, and on ranks of the trainer other than 0.

        Raises:
            InvalidSourceError: The others serve another policy.
            EngineBusyError: A push is under way.
            RefitError: See `Refitter.refit`. The engine is not added, and refuses requests if it was given a policy.
        """
        given = {"manifest": manifest, "calibration": calibration, "kv_scales": kv_scales}
        return run(self._add(engine, state_dict, given, suspends=False))

    async def add_async(
        self,
        engine: object,
        state_dict: "StateDict | None" = None,
        *,
        manifest: Manifest | None = None,
        calibration: Calibration | None = None,
        kv_scales: KvScaleValues | None = None,
    ) -> RefitReport | None:
        """`add` for asynchronous engines."""
        given = {"manifest": manifest, "calibration": calibration, "kv_scales": kv_scales}
        return await self._add(engine, state_dict, given, suspends=True)

    async def _add(
        self, engine: object, state_dict: "StateDict | None", given: dict[str, Any], *, suspends: bool
    ) -> RefitReport | None:
        with nullcontext() if state_dict is None else self._opened(state_dict) as weights:
            fleet, report = self._fleet, None
            if fleet is None:
                return None
            if any(each is engine or each == engine for each in self._engines):
                raise UnsupportedEngineError("an engine is named twice; name every engine once")
            joiner = EngineGroup([engine])
            (own,) = joiner.attached
            both = EngineGroup((*fleet.attached, own))  # it is not one of them
            if both.is_asynchronous and not suspends:
                raise UnsupportedEngineError(
                    "an engine is asynchronous; await add_async in the event loop that drives it"
                )
            if weights is not None:
                await take_turn(fleet._fp8refit_engine, lambda _: _make_room(fleet))
                joiner.ranks.least_version = fleet.ranks.version
                await self._hold(own, "it joins others and has not got their policy yet; wait for it")
                with ErrorCapture() as failed:
                    report = await Refitter(joiner, self._config).refit_async(weights, **given)
                    if not await take_turn(fleet._fp8refit_engine, lambda _: _agrees(joiner, fleet)):
                        raise InvalidSourceError(
                            ["state_dict: is not the policy that the other engines serve; pass that one"]
                        )
                if failed.error is not None:
                    with contextlib.suppress(RefitError):
                        await self._hold(own, f"it could not join others ({type(failed.error).__name__}); refit it")
                    raise failed.take()
            joiner.ranks.leave()
            assert self._fleet is not None, "it was there"
            await self._form((*self._engines, engine), (*self._fleet.attached, own))
        return report

    async def _hold(self, attached: AttachedEngine, why: str) -> None:
        """Make an engine refuse requests until it is refitted."""

        async def refuse(attempt: Attempt) -> None:
            attempt.version = attached.engine.ranks.version  # so that it resumes if this is interrupted
            await attached.engine.pause(self._config)
            await attached.engine.refuse(why)
            attempt.version = None

        await take_turn(attached, refuse)

    def remove(self, engine: object) -> None:
        """Push to an engine no longer. It serves what it does, and gives back what pushes need.

        Args:
            engine: As it was passed.

        Raises:
            ValueError: It is not pushed to.
            UnsupportedEngineError: It is the only one, or behind the router, with which it would come back.
            EngineBusyError: A push is under way.
        """
        self._run(self.remove_async(engine))

    async def remove_async(self, engine: object) -> None:
        """`remove` for asynchronous engines."""
        if self._fleet is None:
            return
        places = [place for place, each in enumerate(self._engines) if each is not engine and each != engine]
        if len(places) == len(self._engines):
            raise ValueError(f"{engine!r} is not pushed to; `engines` has those that are")
        if isinstance(engine, str) and engine in self._routed:
            raise UnsupportedEngineError(f"{engine} is behind the router, and would come back; remove it there")
        removed = [each for place, each in enumerate(self._fleet.attached) if place not in places]
        await self._keep(places)
        await self._let_go(removed)

    async def _let_go(self, removed: Sequence[AttachedEngine]) -> None:
        """Make engines that are pushed to no longer give back what pushes need."""
        for attached in removed:
            with contextlib.suppress(RefitError):
                await take_turn(attached, lambda _, ranks=attached.engine.ranks: ranks.close())  # type: ignore[misc]

    async def _keep(self, places: Sequence[int]) -> None:
        assert self._fleet is not None, "some are pushed to"
        attached = self._fleet.attached
        await self._form([self._engines[place] for place in places], [attached[place] for place in places])

    async def _drop_or_raise(self, failed: ErrorCapture, weights: StateDict) -> None:
        """Push to lost engines no longer, if that is wanted and any is left.

        Raises:
            BaseException: What failed, if the policy cannot be pushed to the others now.
        """
        fleet = self._fleet
        may_drop = fleet is not None and self._on_lost == "drop"
        if not may_drop or not isinstance(failed.error, EngineLostError | TransportError):
            raise failed.take()
        assert fleet is not None, "some are pushed to"
        answers = [place for place, is_lost in enumerate(await fleet.ranks.are_lost()) if not is_lost]
        if not answers or len(answers) == len(self._engines):
            raise failed.take()
        said = str(failed.error)
        logger.warning("%s; this engine is pushed to no longer, and %d others are", said, len(answers))
        await self._keep(answers)
        if isinstance(weights, Iterator | Gathered):  # read in part: the next push heals the others
            raise failed.take()
        failed.error = None

    def _run(self, steps: Coroutine[Any, Any, T]) -> T:
        """See `Refitter._run`. Other ranks of the trainer have no engine that could suspend."""
        return self._refitter._run(steps) if self._refitter is not None else run(steps)

    def fingerprints(self) -> list[str]:
        """Return a digest of the live weights of every rank of every engine, engine by engine."""
        return self._refitter.fingerprints() if self._refitter is not None else []

    @override
    def close(self) -> None:
        """Leave the broadcast group, and release everything except the engines."""
        if self._refitter is not None:
            self._refitter.close()

    async def close_async(self) -> None:
        """`close` for asynchronous engines."""
        if self._refitter is not None:
            await self._refitter.close_async()

    def _opened(self, state_dict: StateDict) -> AbstractContextManager[StateDict]:
        """What rank 0 reads, while the other ranks take part in gathers.

        Raises:
            InvalidSourceError: Several ranks cannot read it together.
        """
        if self._group is None or isinstance(state_dict, Gathered):
            return nullcontext(state_dict)
        if not isinstance(state_dict, Mapping | list | tuple):
            raise InvalidSourceError(
                [f"{type(state_dict).__name__}: the ranks of a trainer push a mapping, or fp8refit.gathered of one"]
            )
        pairs: Mapping[str, Tensor] | Sequence[tuple[str, Tensor]] = state_dict
        config = self._config
        return Gathered(pairs, self._group, bucket_bytes=config.bucket_bytes, timeout_s=_PATIENCE * config.timeout_s)


async def _make_room(fleet: EngineGroup) -> None:
    """Learn the engines' versions, and leave their group and its port. The next push joins them again."""
    await fleet.ranks.are_lost()
    fleet.ranks.leave()


async def _agrees(joiner: EngineGroup, fleet: EngineGroup) -> bool:
    """Whether an engine holds the weights that each one of the same slots does."""
    (slots, own), are_lost = await _held_by(joiner.ranks), await fleet.ranks.are_lost()
    for attached, is_lost in zip(fleet.attached, are_lost, strict=True):
        if not is_lost and not attached.engine.ranks.is_dirty:
            other_slots, fingerprints = await _held_by(attached.engine.ranks)
            if other_slots == slots and fingerprints != own:
                return False
    return True


async def _held_by(ranks: Ranks) -> tuple[object, list[str]]:
    return (await ranks.layout()).slots, list(await ranks.fingerprints())
