"""Connects a driver with its engine's ranks on the same host, for engines whose own RPC loses the ranks' answers.

It is a Unix socket in a folder that only this user can open. The driver listens. The engine tells each rank the address;
the rank connects, identifies itself, and answers messages until the last. A message is text, after a header with its length
and whether another one follows.
"""

import asyncio
import contextlib
import os
import select
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fp8refit.errors import EngineLostError, RankFailedError

T = TypeVar("T")

_HEADER_BYTES = 8
_MORE = 1 << 63
"""In a header: another message follows the answer to this one."""
_MAX_BYTES = 1 << 28
_MAX_PATH_BYTES = 100
"""The kernel allows 107 bytes for the address of a Unix socket."""
_LAST_LOOK_S = 0.5
"""Seconds to take what has arrived, once the time is over."""


class Switchboard:
    """The driver's end.

    Args:
        num_ranks: How many ranks call.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None
        self._connections: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._all_called = asyncio.Event()
        self._turn = asyncio.Lock()
        self._talking: asyncio.Task[Any] | None = None
        self.address = ""
        self.has_been_called = False
        """Whether any rank has ever connected."""

    async def send(
        self,
        messages: Sequence[str],
        ring: Callable[[str], Awaitable[None]],
        *,
        timeouts_s: Sequence[float],
        goes_on: Callable[[list[Sequence[str]]], bool] = lambda heard: True,
        on_told: Callable[[], object] | None = None,
    ) -> list[Sequence[str]]:
        """Connect to every rank, and send messages one after another. The ranks do nothing else meanwhile.

        If the caller is cancelled, no further message is sent, but the current one is answered before the ranks are asked
        anything else: a message cannot be taken back, and an engine's own RPC may not survive being abandoned.

        Args:
            messages: The texts. After answering the last one, or when there are no more, the ranks go back to their own work.
            ring: Tells every rank to answer at an address. Returns when all have, and raises if they cannot.
            timeouts_s: Seconds to wait for the answers to each message, and in total for all of them.
            goes_on: Whether to send the next message, given the answers so far.
            on_told: Called once the last message is on its way to every rank. Then the event loop may stop.

        Returns:
            The answers to each message that was sent, in rank order.

        Raises:
            EngineLostError: A rank died or did not answer in time.
        """
        await self._open()
        is_left = False

        async def converse() -> list[Sequence[str]]:
            heard: list[Sequence[str]] = []
            for message, timeout_s in zip(messages, timeouts_s, strict=True):
                is_last = len(heard) == len(messages) - 1
                told = self._tell(message, is_last=is_last, on_told=on_told if is_last else None)
                heard.append(await _in_time(told, timeout_s))
                if not is_last and (is_left or not goes_on(heard)):
                    break
            return heard

        self._talking = asyncio.ensure_future(self._talk(converse, ring, sum(timeouts_s)))
        try:
            return await asyncio.shield(self._talking)
        finally:
            is_left = True

    async def _tell(self, message: str, *, is_last: bool, on_told: Callable[[], object] | None) -> Sequence[str]:
        frame = _frame(message, has_more=not is_last)
        for _, writer in self._connections.values():
            writer.write(frame)  # the event loop sends it while the answers are awaited
        if on_told is not None:
            await asyncio.gather(*(_send_all(writer) for _, writer in self._connections.values()))
            on_told()
        return await asyncio.gather(*(_read(self._connections[rank][0]) for rank in range(self._num_ranks)))

    async def _talk(
        self, converse: Callable[[], Awaitable[T]], ring: Callable[[str], Awaitable[None]], timeout_s: float
    ) -> T:
        async with self._turn:
            self._hang_up()  # ranks connect for every conversation, as another driver may have asked them since
            ringing = asyncio.ensure_future(ring(self.address))

            async def talk() -> T:
                await self._wait_for_calls(ringing)
                found = await converse()
                self._hang_up()
                await ringing
                return found

            try:
                return await _in_time(talk(), timeout_s)
            except TimeoutError as error:
                raise _late(timeout_s) from error
            except (OSError, EOFError) as error:
                raise EngineLostError(f"a rank of the engine is gone ({error}); restart the engine") from error
            finally:
                ringing.cancel()
                self._hang_up()

    def close(self) -> None:
        """Close all connections and stop listening."""
        self._hang_up()
        if self._server is not None:
            with contextlib.suppress(RuntimeError):
                self._server.close()
            self._server = None

    def _hang_up(self) -> None:
        """Close all connections. Late answers are ignored."""
        for _, writer in self._connections.values():
            # Also works once the event loop is closed.
            with contextlib.suppress(OSError, RuntimeError), _duplicate_socket(writer) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()
        self._connections.clear()
        self._all_called = asyncio.Event()

    async def _open(self) -> None:
        """Listen, in the current event loop."""
        loop = asyncio.get_running_loop()
        if self._server is not None and self._loop is loop:
            return
        self.close()
        self._turn = asyncio.Lock()
        folder = _private_folder()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.address = str(folder / "socket")
        self._loop, self._server = loop, await asyncio.start_unix_server(self._take_call, self.address)

    async def _take_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the latest call of each rank, until all have called. Callers that hung up do not count."""
        try:
            rank = int(await _read(reader))
        except (ValueError, RankFailedError, EOFError, OSError):
            rank = -1
        is_rank = rank in range(self._num_ranks)
        self.has_been_called |= is_rank
        if not is_rank or self._all_called.is_set() or _has_hung_up(writer):
            writer.close()
            return
        for other, (_, earlier) in list(self._connections.items()):
            if other == rank or _has_hung_up(earlier):
                del self._connections[other]
                earlier.close()
        self._connections[rank] = reader, writer
        if len(self._connections) == self._num_ranks:
            self._all_called.set()

    async def _wait_for_calls(self, ringing: asyncio.Future[None]) -> None:
        """Wait until every rank has connected or could not be told to."""
        calls = asyncio.ensure_future(self._all_called.wait())
        try:
            await asyncio.wait((calls, ringing), return_when=asyncio.FIRST_COMPLETED)
            if ringing.done() and not self._all_called.is_set():
                ringing.result()
                await asyncio.wait((calls,), timeout=_LAST_LOOK_S)  # it may have connected a moment before it said so
                if not self._all_called.is_set():
                    raise EOFError("it was told to connect, but did not")
        finally:
            calls.cancel()


class RankConnection:
    """A rank's end of the connection.

    Args:
        address: Where the driver listens.
        rank: This rank.
        timeout_s: Seconds to wait for a whole message.

    Raises:
        RankFailedError: The driver is not there.
    """

    def __init__(self, address: str, rank: int, *, timeout_s: float) -> None:
        self._socket, self._timeout_s = socket.socket(socket.AF_UNIX), timeout_s
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(address)
            self.answer(str(rank))
        except OSError as error:
            self._socket.close()
            raise RankFailedError(f"the driver cannot be reached at {address} ({error})") from error

    def messages(self) -> Iterator[str]:
        """Yield the driver's messages. Answer each before the next.

        Raises:
            RankFailedError: The driver hung up in the middle, or is silent.
        """
        has_more, is_first = True, True
        while has_more:
            deadline_s = time.monotonic() + self._timeout_s
            header = self._take(_HEADER_BYTES, deadline_s, may_end=not is_first)
            if not header:
                return
            has_more, is_first = bool(int.from_bytes(header) & _MORE), False
            yield self._take(_size_of(header), deadline_s).decode()

    def answer(self, message: str) -> None:
        """Send an answer.

        Raises:
            RankFailedError: The driver hung up.
        """
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(_frame(message))
        except OSError as error:
            raise RankFailedError(f"the driver hung up ({error})") from error

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _take(self, num_bytes: int, deadline_s: float, *, may_end: bool = False) -> bytes:
        """Receive `num_bytes`; none if `may_end` and the driver hung up before the first one."""
        taken = bytearray()
        while len(taken) < num_bytes:
            try:
                self._socket.settimeout(max(deadline_s - time.monotonic(), 1e-3))
                part = self._socket.recv(min(num_bytes - len(taken), 1 << 20))
            except OSError as error:
                raise RankFailedError(f"the driver is silent ({error})") from error
            if not part:
                if may_end and not taken:
                    break
                raise RankFailedError("the driver hung up")
            taken += part
        return bytes(taken)


async def _in_time(steps: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run steps to their end, or until the time is over.

    A synchronous engine's event loop stands still while the caller reads its source. Answers that have arrived by then are
    in time, so they are taken after the time is over too.

    Raises:
        EngineLostError: The steps take longer than `timeout_s`.
    """
    task = asyncio.ensure_future(steps)
    try:
        await asyncio.wait((task,), timeout=timeout_s)
        if not task.done():
            await asyncio.wait((task,), timeout=_LAST_LOOK_S)
            if not task.done():
                raise _late(timeout_s)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


def _late(timeout_s: float) -> EngineLostError:
    return EngineLostError(
        f"the engine did not answer within {timeout_s:g} s; restart it. If it only needs longer, for example to read files, "
        "raise timeout_s"
    )


def _has_hung_up(writer: asyncio.StreamWriter) -> bool:
    """Whether the peer is gone, even if the event loop has not noticed yet."""
    if writer.is_closing():
        return True
    try:
        poll = select.poll()
        poll.register(writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True


def _duplicate_socket(writer: asyncio.StreamWriter) -> socket.socket:
    """Return a duplicate of the writer's socket: uvloop does not allow every call on its own."""
    return socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))


async def _send_all(writer: asyncio.StreamWriter) -> None:
    """Wait until the kernel has everything that was written, so that the event loop need not run any more."""
    while writer.transport.get_write_buffer_size():
        await writer.drain()
        await asyncio.sleep(0)


async def _read(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readexactly(_size_of(await reader.readexactly(_HEADER_BYTES)))).decode()
    except asyncio.IncompleteReadError as error:
        raise EOFError("it hung up") from error


def _frame(message: str, *, has_more: bool = False) -> bytes:
    body = message.encode()
    return (len(body) | _MORE * has_more).to_bytes(_HEADER_BYTES) + body


def _size_of(header: bytes) -> int:
    """Return the message size that `header` announces.

    Raises:
        RankFailedError: It is longer than any message of ours.
    """
    size = int.from_bytes(header) & ~_MORE
    if size > _MAX_BYTES:
        raise RankFailedError(f"a message of {size} bytes was announced, which is not one of ours")
    return size


def _private_folder() -> Path:
    """Create a folder that only this user can open, with a path short enough for a socket address."""
    folder = Path(tempfile.mkdtemp(prefix="fp8refit-"))
    if len(os.fsencode(folder)) > _MAX_PATH_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="fp8refit-", dir="/tmp"))
    return folder
