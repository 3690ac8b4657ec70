"""The driver's side of an engine in a process that takes orders, such as a server. It is the same for all engines.

It has the control plane, the channel to the ranks, and ranks that are found again after the server was restarted.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from typing_extensions import override

from fp8refit.config import Job, RefitConfig
from fp8refit.errors import InvalidSourceError, RefitError, TransportError
from fp8refit.remote.host.host_route import Offered
from fp8refit.remote.protocol.channel import GRACE_S, Answers, Channel
from fp8refit.remote.ranks import RemoteRanks
from fp8refit.remote.servers.connection import Connection
from fp8refit.remote.servers.control import ControlPlane
from fp8refit.remote.servers.orders import MAX_REASON, Answer, AnyOrder, Flush, Pause, Refuse, Resume, Send, Tokenize
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.sources.source import Source, StreamSource
from fp8refit.transport.running import InThread, begun

T = TypeVar("T")


class ServerDriver(ControlPlane, Channel):
    """An engine's control plane, and a `fp8refit.remote.protocol.channel.Channel`, by orders to a server.

    Args:
        server: The connection to it.

    Raises:
        EngineLostError: It cannot be reached.
        UnsupportedEngineError: It does not have our plugin, or does not take orders from here.
    """

    def __init__(self, server: Connection) -> None:
        self.server = server
        self._timeout_s = RefitConfig().timeout_s
        self._new_version: int | None = None
        self._is_resumed = False
        """Whether the server has resumed requests since the last pause, with the answer to the write."""
        self.pinged = server.ping()
        """Name of the server that answered, which changes with every start."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether an event loop runs in this thread."""
        return asyncio._get_running_loop() is not None

    async def check_ready(self) -> None:
        """Do nothing: `pause` takes care of running requests, and the ranks know whether their weights are asleep."""

    @override
    async def pause(self, config: RefitConfig) -> int:
        self._timeout_s, self._new_version, self._is_resumed = config.timeout_s, None, False
        self.server.num_pauses += 1
        return (await self._post(Pause(config=config, number=self.server.num_pauses))).value

    @override
    async def resume(self) -> None:
        if self._is_resumed:
            self._is_resumed = False
            return
        await self._post(Resume(version=self._new_version, number=self.server.num_pauses))

    @override
    async def refuse(self, reason: str) -> None:
        await self._post(Refuse(reason=reason[:MAX_REASON], number=self.server.num_pauses))

    @override
    async def flush_caches(self) -> None:
        await self._post(Flush())

    @override
    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        return (await self._post(Tokenize(prompts=tuple(prompts)))).token_ids

    @override
    async def publish_version(self, version: int) -> None:
        """Remember the version. `resume` sends it to the server."""
        self._new_version = version

    @property
    @override
    def serves_meanwhile(self) -> bool:
        """Whether others send it requests."""
        return self.server.is_shared

    @property
    @override
    def num_ahead(self) -> int:
        return 2 if self.server.is_shared else 0

    @override
    async def send(self, messages: Sequence[str], timeouts_s: Sequence[float], *, begins: bool) -> Awaitable[Answers]:
        answers = self._exchange(messages, timeouts_s)
        if not begins:
            return answers
        return await begun(answers) if self.is_asynchronous else InThread(answers)

    async def _exchange(self, messages: Sequence[str], timeouts_s: Sequence[float]) -> Answers:
        order = Send(messages=tuple(messages), timeouts_s=tuple(timeouts_s))
        flush_s = self._timeout_s if len(messages) > 1 else 0.0
        answer = await self._post(order, sum(timeouts_s) + flush_s)
        self._is_resumed |= answer.is_resumed
        return Answers(said=answer.said, is_refused=answer.is_refused, **answer.times_s)

    async def _post(self, order: AnyOrder, timeout_s: float | None = None) -> Answer:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        with self.named():
            return await self.do(partial(self.server.post, order, timeout_s=timeout_s + GRACE_S))

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Add to an error which server it comes from, because there may be several."""
        try:
            yield
        except RefitError as error:
            if self.server.label not in str(error):
                error.add_note(f"from {self.server.label}")
            raise

    async def do(self, step: Callable[[], T]) -> T:
        """Run `step` in another thread if an event loop runs in this one; otherwise here, without suspending."""
        return await asyncio.to_thread(step) if self.is_asynchronous else step()


class ServedRanks(RemoteRanks):
    """The ranks of a server, which may be started again between two refits.

    Args:
        driver: Reaches them.
    """

    def __init__(self, driver: ServerDriver) -> None:
        super().__init__(driver, named=driver.named)
        self._driver = driver

    @override
    async def handshake(self, job: Job) -> None:
        server = await self._driver.do(self._driver.server.ping)
        if server != self._driver.pinged or self.client.lost_because is not None:
            self._release()
            self.client.start_over()  # another server answers in its place
            self._driver.pinged = server
        self._check_can_be_met(job.config)
        await super().handshake(job)

    def _check_can_be_met(self, config: RefitConfig) -> None:
        """Check that a server on another host is not asked to join a broadcast at the default loopback address.

        Raises:
            TransportError: It would be.
        """
        server, collective = self._driver.server, config.collective
        if config.transport == "collective" and not server.is_here and "host" not in collective.model_fields_set:
            raise TransportError(
                f"{server.label} runs on another host than this process, or in another container, and cannot reach its "
                f'loopback address: name an address of this host that it can reach, collective={{"host": ADDRESS}}, or '
                "--host"
            )

    @override
    async def _offer(self, source: Source, job: Job) -> Offered:
        """Describe how the server's processes get the source's tensors.

        Raises:
            TransportError: The server's processes cannot map memory of this one.
        """
        server = self._driver.server
        if isinstance(source, SafetensorsSource) and not await self._driver.do(
            partial(server.sees, str(source.path.resolve()))
        ):
            source = as_stream(source)
        if not isinstance(source, SafetensorsSource) and not server.is_here:
            raise TransportError(
                f"{server.label} runs on another host than this process, or in another container, and cannot map "
                'its memory; set transport="collective", or pass the path of a checkpoint that the server can read'
            )
        return await super()._offer(source, job)


def as_stream(files: SafetensorsSource) -> StreamSource:
    """The same tensors, read in this process.

    Raises:
        InvalidSourceError: Names are stored twice.
    """
    if files.problems:
        raise InvalidSourceError(files.problems)
    return StreamSource(lambda: iter(files), is_repeatable=True, manifest=files.metadata)
