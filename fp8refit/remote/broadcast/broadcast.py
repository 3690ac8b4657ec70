"""The driver's side of a broadcast: one group with the ranks of one or more engines, kept between refits."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor

from fp8refit.config import Job, RefitConfig
from fp8refit.errors import InvalidSourceError, RefitError, StagingMemoryError, TransportError
from fp8refit.fill.ties import untied
from fp8refit.live.layout import EngineLayout
from fp8refit.live.layout_guard import LayoutGuard
from fp8refit.remote.broadcast.peer import BroadcastPeer
from fp8refit.remote.broadcast.receiver import digest_of
from fp8refit.remote.broadcast.sections import Sections, find_sections
from fp8refit.remote.broadcast.sender import Sender, Sending
from fp8refit.remote.broadcast.wire_formats import Wire, choose_wire
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.source_summary import SourceSummary, summarize
from fp8refit.report import RankReport
from fp8refit.sources.source import MappingSource, RandomAccess, Source
from fp8refit.transport.collective.buckets import largest_bytes
from fp8refit.transport.collective.communicator import Backend, Communicator
from fp8refit.transport.error_capture import ErrorCapture

T = TypeVar("T")
_LOOK_S = 2.0
"""How often a trainer looks for lost engines while it sends ahead."""


Together: TypeAlias = Callable[[Sequence[Coroutine[Any, Any, Any]]], Awaitable[list[Any]]]
"""Awaits several calls concurrently, one per engine. If any raises, it raises the first error, once all have ended."""


async def alone(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """`Together` for one engine."""
    return [await call for call in calls]


@runtime_checkable
class SendsAhead(Protocol):
    """Ranks to which a policy may be sent before they are told to write it."""

    @property
    def ahead_s(self) -> float:
        """Seconds in which the last `prepare` sent the policy; 0 if `write` sends it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Plan:
    """How policies of one layout are announced and sent."""

    said: SourceSummary
    config: RefitConfig
    guard: LayoutGuard | None
    """Recognizes policies with the same summary; None if it depends on values."""
    made_for: tuple[object, ...]
    wire: Wire
    sender: Sender
    offer: messages.Broadcast
    """Without the token of a group."""

    def fits(self, source: MappingSource, config: RefitConfig) -> bool:
        """Whether a policy is known to have the same summary."""
        return self.config == config and self.guard is not None and self.guard.holds(source.sent_names, source.sent)


class Broadcast:
    """Connects to engines, announces policies to them, and sends them.

    Args:
        peers: The engines.
        together: Awaits calls to all of them concurrently.
    """

    def __init__(self, peers: Sequence[BroadcastPeer], together: Together = alone) -> None:
        self._peers = tuple(peers)
        self._together = together
        self._communicator: Communicator | None = None
        self._config = RefitConfig()
        self._free_bytes = 0
        """Least memory that a rank's GPU has for buckets."""
        self._is_short = False
        """Whether a rank has had no room for what was to be sent ahead by itself."""
        self._layouts: list[EngineLayout] | None = None
        self._sections = Sections()
        self._plan: _Plan | None = None
        """That of the last policy."""
        self._known_digest = ""
        """Digest of the offer that all ranks know."""
        self._prepared: tuple[Source, Job] | None = None
        self._refit = ""
        self._is_read = False
        """Whether sending it ahead has begun."""
        self.ahead_s = 0.0
        """Seconds in which the last policy was sent ahead; 0 if it was not."""

    async def prepare(self, source: Source, job: Job) -> bool:
        """Check a source, connect to the engines, and make all ranks check the offer. Writes nothing.

        What is sent ahead is sent now. Otherwise, a single engine that knows the offer may postpone its check to the write, to
        save an exchange. Returns whether `write` makes it drop its caches.

        Raises:
            InvalidSourceError: It does not fit, or its contents are unknown.
            NonFiniteError: NaN or Inf, with `validate="strict"` or in what is sent ahead.
            TransportError: A rank did not join, or cannot be reached.
            StagingMemoryError: There is no room for the buffers.
            RefitError: See `Ranks.prepare`.
            BaseException: Whatever reading a source raised that is sent ahead.
        """
        waits, self.ahead_s, self._is_read = False, 0.0, False
        with ErrorCapture() as failed:
            was_joined = self._communicator is not None
            with ErrorCapture() as stale:
                waits = await self._prepare(source, job)
            was_read = self._is_read and not isinstance(source, MappingSource)
            if isinstance(stale.error, StagingMemoryError) and self._may_send_later():
                self._is_short = True
                await self._abandon()
                self.leave()
                with ErrorCapture() as stale:
                    waits = await self._prepare(source, job)
            if was_joined and isinstance(stale.error, TransportError) and not was_read:
                # An engine was restarted, or another trainer has refitted it: connect again, once.
                await self._abandon()
                self.leave()
                stale.error = None
                waits = await self._prepare(source, job)
            if stale.error is not None:
                raise stale.take()
        if failed.error is not None:
            self._prepared, self._known_digest = None, ""
            await self._abandon()
            if self._plan is not None and self._plan.offer.is_ahead:
                self.leave()  # as ranks do that were receiving
            raise failed.take()
        return waits

    async def write(self, version: int) -> list[Sequence[RankReport]]:
        """Send what was prepared, and make every rank write and commit it. Returns the reports of each engine.

        Args:
            version: Lowest version of the new policy.

        Raises:
            BaseException: Whatever reading the source raised.
            RefitError: A rank failed. No engine has committed and all are dirty; except if a single engine's postponed
                check failed: then nothing was written.
            CacheFlushError: The engine kept its caches; nothing was written.
            EngineLostError: An engine is lost. The others are dirty.
        """
        prepared, self._prepared = self._prepared, None
        assert prepared is not None, "write() follows prepare()"
        source, job = prepared
        with ErrorCapture() as failed:
            return await self._send(source, version)
        is_ahead = self._plan is not None and self._plan.offer.is_ahead
        if isinstance(failed.error, TransportError) and not is_ahead and any(p.client.has_refused for p in self._peers):
            # See `prepare`. The ranks check again when they take it, because caches are dropped in between.
            with ErrorCapture() as failed:
                await self._prepare(source, job, is_again=True)
                return await self._send(source, version)
            await self._abandon()
        raise failed.take()

    async def _send(self, source: Source, version: int) -> list[Sequence[RankReport]]:
        plan, communicator = self._plan, self._communicator
        assert plan is not None and communicator is not None, "prepared"
        sender = plan.sender
        if plan.offer.is_ahead:
            step = partial(sender.confirm, communicator)
        else:
            _wait_for_trainer(sender.device)
            step = partial(sender.send, source, communicator, self._refit, layout=plan.guard)
        sending = Sending(step, sender, communicator)

        async def take(peer: BroadcastPeer) -> Sequence[RankReport]:
            with ErrorCapture() as failed:
                return await peer.take(version)
            communicator.expect_end(str(failed.error))
            raise failed.take()

        reports: list[Sequence[RankReport]] = []
        with ErrorCapture() as refused:
            reports = await self._together([take(peer) for peer in self._peers])
        error = sending.end(refused.error, timeout_s=self._config.timeout_s)
        if error is not None:
            self._give_up(sending, error)
            raise error
        return reports

    async def _send_ahead(self, source: Source) -> None:
        """Send a policy while requests run.

        Raises:
            BaseException: See `Sender.send_ahead`.
        """
        plan, communicator, start_s = self._plan, self._communicator, time.perf_counter()
        assert plan is not None and communicator is not None, "offered"
        sender = plan.sender
        self._is_read = True
        _wait_for_trainer(sender.device)
        step = partial(sender.send_ahead, source, communicator, layout=plan.guard)
        sending = Sending(step, sender, communicator)
        is_over = partial(sending.is_over, within_s=_LOOK_S)
        is_asynchronous = any(peer.client.channel.is_asynchronous for peer in self._peers)
        with ErrorCapture() as failed:
            while not (await asyncio.to_thread(is_over) if is_asynchronous else is_over()):
                # A lost engine is noticed here: no order to it is under way.
                await self._together([peer.client.ask(messages.Do(step="hello")) for peer in self._peers])
        end = partial(sending.end, failed.error, timeout_s=plan.config.timeout_s)
        error = await asyncio.shield(asyncio.to_thread(end)) if is_asynchronous else end()
        if error is not None:
            self._give_up(sending, error)
            raise error
        self.ahead_s = time.perf_counter() - start_s

    def _give_up(self, sending: Sending, error: BaseException) -> None:
        self.leave(why=str(error) or type(error).__name__)
        if sending.is_under_way:
            self._plan = None  # together with its buffers, which are still in use

    async def _prepare(self, source: Source, job: Job, *, is_again: bool = False) -> bool:
        offer = await self._offer(source, job.config)
        self._refit = uuid.uuid4().hex
        # With several engines one might write while another refuses; and a stream cannot be sent twice.
        is_alone = len(self._peers) == 1 and isinstance(source, MappingSource) and job.kv is None
        may_wait = is_alone and (offer.tensors is None or offer.is_ahead or is_again)
        waits = await self._together(
            [peer.prepare(offer, refit=self._refit, job=job, may_wait=may_wait) for peer in self._peers]
        )
        assert all(waits) or not is_again, "what waited once waits again"
        self._known_digest, self._prepared = offer.digest, (source, job)
        if offer.is_ahead:
            await self._send_ahead(source)
        return all(waits)

    async def _abandon(self) -> None:
        with contextlib.suppress(RefitError):
            await self._together([peer.host_route.abandon() for peer in self._peers])

    async def _offer(self, source: Source, config: RefitConfig) -> messages.Broadcast:
        """Check a source, and make its offer."""
        said, guard = self._summarize(source, config)
        device = _device_of(source)
        communicator = await self._join(config, device)
        layouts, sends_both = await self._known_layouts(), not isinstance(source, RandomAccess)
        token, is_at_rest = communicator.meeting.token, isinstance(source, MappingSource)
        in_order = list(said.metadata)  # in which a stream is read
        made_for = said, in_order, config, device, layouts, sends_both, token, is_at_rest
        if self._plan is None or self._plan.made_for != made_for:
            self._plan = None  # its buffers make room for those of the next
            wire = choose_wire(said.metadata, layouts, config, self._sections, sends_both=sends_both)
            sender = Sender(wire, config, device, num_sections=self._sections.num_sections)
            num_bytes = len(sender.buckets) * largest_bytes(sender.buckets)
            offer = messages.Broadcast(
                token="",
                digest="",
                tensors=wire.tensors,
                sections=self._sections.of_rank,
                bucket_bytes=config.bucket_bytes,
                num_buckets=len(sender.buckets),
                is_ahead=self._is_ahead(config, num_bytes, is_at_rest=is_at_rest),
                problems=tuple(said.problems),
                odd_scales=said.odd_scales,
                unfit=said.unfit,
            )
            offer = offer.model_copy(update={"digest": digest_of(offer)})
            self._plan = _Plan(
                said=said, config=config, guard=guard, made_for=made_for, wire=wire, sender=sender, offer=offer
            )
        plan = self._plan = replace(self._plan, guard=guard)
        if isinstance(source, RandomAccess) and (problems := untied(plan.wire.ties, source)):
            raise InvalidSourceError(problems)
        known = {"tensors": None} if plan.offer.digest == self._known_digest else {}
        return plan.offer.model_copy(update={"token": communicator.meeting.token, **known})

    def _is_ahead(self, config: RefitConfig, num_bytes: int, *, is_at_rest: bool) -> bool:
        """Whether a policy is sent before the ranks are told to take it; see `CollectiveConfig.stage`."""
        if config.collective.stage != "auto":
            return config.collective.stage == "ahead"
        clients = [peer.client for peer in self._peers]
        are_fit = all(client.channel.serves_meanwhile and client.num_ranks == 1 for client in clients)
        return is_at_rest and are_fit and not self._is_short and num_bytes <= self._free_bytes

    def _may_send_later(self) -> bool:
        """Whether a policy was to be sent ahead, and need not be."""
        plan = self._plan
        return plan is not None and plan.offer.is_ahead and plan.config.collective.stage == "auto"

    def _summarize(self, source: Source, config: RefitConfig) -> tuple[SourceSummary, LayoutGuard | None]:
        """Check a source, or recognize its layout as the last one's. Also returns what recognizes the next one.

        Raises:
            InvalidSourceError: Its contents are unknown.
        """
        plan = self._plan
        if plan is not None and isinstance(source, MappingSource) and plan.fits(source, config):
            return plan.said, plan.guard
        said = summarize(source, config)
        if said is None:
            raise InvalidSourceError(
                ["source: can be read only once, and a broadcast must announce its tensors first; pass a manifest"]
            )
        if not isinstance(source, MappingSource) or said.problems or said.depends_on_values(config):
            return said, None
        return said, LayoutGuard(source.sent_names, source.sent)

    def leave(self, *, why: str = "the trainer left") -> None:
        """Leave the group, as after any failure. The next refit connects and announces again."""
        communicator, self._communicator = self._communicator, None
        self._known_digest, self._layouts = "", None
        if communicator is not None:
            communicator.abort(why)

    def close(self) -> None:
        """Release everything."""
        self.leave()
        self._plan = self._prepared = None

    async def _join(self, config: RefitConfig, device: torch.device) -> Communicator:
        communicator = self._communicator
        how = config.collective
        if communicator is not None and communicator.is_joined and self._config.collective == how:
            return communicator
        self.leave()
        layouts = await self._known_layouts()
        sizes = [peer.client.num_ranks for peer in self._peers]
        on_gpus = device.type == "cuda" and all(layout.device.startswith("cuda") for layout in layouts)
        backend: Backend = how.backend if how.backend != "auto" else "nccl" if on_gpus else "gloo"
        opened = Communicator.open(
            host=how.host,
            port=how.port,
            size=1 + sum(sizes),
            backend=backend,
            timeout_s=config.timeout_s,
            sections=self._sections.of_rank,
        )
        orders = [
            messages.Join(meeting=opened.meeting, first_rank=1 + sum(sizes[:place]), timeout_s=config.timeout_s)
            for place in range(len(sizes))
        ]
        with ThreadPoolExecutor(1) as thread, ErrorCapture() as failed:
            joined = thread.submit(opened.join, device, timeout_s=config.timeout_s)
            with ErrorCapture() as refused:
                asked = [peer.client.ask(order) for peer, order in zip(self._peers, orders, strict=True)]
                replies = await self._together(asked)
                self._free_bytes = min(reply.free_bytes for of_engine in replies for reply in of_engine)
            if refused.error is not None:
                opened.expect_end(str(refused.error))
            with ErrorCapture() as absent:
                joined.result()
            for caught in (refused, absent):
                if caught.error is not None:
                    raise caught.take()
        if failed.error is not None:
            opened.abort(str(failed.error))
            raise failed.take()
        self._communicator, self._config = opened, config
        return opened

    async def _known_layouts(self) -> list[EngineLayout]:
        if self._layouts is None:
            self._layouts = [layout for peer in self._peers for layout in await peer.layouts()]
            self._sections = find_sections(self._layouts)
        return self._layouts


def _wait_for_trainer(device: torch.device) -> None:
    """Wait for what the trainer computes, which has to be there before it is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_of(source: Source) -> torch.device:
    """The device to quantize on: the GPU of the source's tensors, or the current one."""
    if isinstance(source, MappingSource):
        # Values as they were sent: a recognized source's tensors are not checked one by one.
        found = next((value.device for value in source.sent if isinstance(value, Tensor) and value.is_cuda), None)
        if found is not None:
            return found
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
