"""A line between a driver and the ranks of its engine on the same host, for engines whose own RPC loses what ranks say.

It is a Unix socket in a folder that only this user can open. The driver waits; a rank that the engine tells the address
calls, says who it is, and answers one message. Messages are text, framed by their length.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from fp8refit.errors import EngineLostError, RankFailedError

_HEADER_BYTES = 8
_MAX_BYTES = 1 << 28
_MAX_PATH_BYTES = 100
"""The kernel takes 107 for the address of a Unix socket."""


class Switchboard:
    """The driver's end.

    Args:
        num_ranks: How many ranks call.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None
        self._lines: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._all_called = asyncio.Event()
        self._turn = asyncio.Lock()
        self._asking: asyncio.Task[Sequence[str]] | None = None
        self.address = ""
        self.has_been_called = False
        """Whether any rank has ever called."""

    async def ask(self, message: str, ring: Callable[[str], Awaitable[None]], *, timeout_s: float) -> Sequence[str]:
        """Give `message` to every rank, and their answers in order of rank.

        If the caller is cancelled the ranks answer all the same, before they are asked anything else: what was rung for cannot
        be taken back, and an engine's own RPC may not survive that it is left.

        Args:
            message: The text.
            ring: Tells every rank to answer at an address; returns when all have, and raises if they cannot.
            timeout_s: Seconds to wait for all of it.

        Raises:
            EngineLostError: A rank died or did not answer in time.
        """
        await self._open()
        self._asking = asyncio.ensure_future(self._ask_in_turn(message, ring, timeout_s))
        return await asyncio.shield(self._asking)

    async def _ask_in_turn(
        self, message: str, ring: Callable[[str], Awaitable[None]], timeout_s: float
    ) -> Sequence[str]:
        async with self._turn:
            return await self._ask(message, ring, timeout_s)

    async def _ask(self, message: str, ring: Callable[[str], Awaitable[None]], timeout_s: float) -> Sequence[str]:
        self._hang_up()  # every question is a new call: another driver may have had the ranks since
        ringing = asyncio.ensure_future(ring(self.address))
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_for_calls(ringing)
                answers = await asyncio.gather(*(self._ask_one(rank, message) for rank in range(self._num_ranks)))
                await ringing
        except TimeoutError as error:
            raise EngineLostError(
                f"the engine did not answer within {timeout_s:g} s; start it again. If it only takes longer, as reading files "
                "may, raise timeout_s"
            ) from error
        except (OSError, EOFError) as error:
            raise EngineLostError(f"a rank of the engine is gone ({error}); start the engine again") from error
        finally:
            ringing.cancel()
            self._hang_up()
        return answers

    def close(self) -> None:
        """Hang up on every rank, and take no more calls."""
        self._hang_up()
        if self._server is not None:
            with contextlib.suppress(RuntimeError):
                self._server.close()
            self._server = None

    def _hang_up(self) -> None:
        """Forget every call: what a rank might still say is not asked for any more."""
        for _, writer in self._lines.values():
            # Of a duplicate: uvloop lets nobody shut down its own. Works when the event loop is closed too.
            with (
                contextlib.suppress(OSError, RuntimeError),
                socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as line,
            ):
                line.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()
        self._lines.clear()
        self._all_called = asyncio.Event()

    async def _open(self) -> None:
        """Wait for calls, in the event loop that runs now."""
        loop = asyncio.get_running_loop()
        if self._server is not None and self._loop is loop:
            return
        self.close()
        self._turn = asyncio.Lock()
        folder = _private_folder()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.address = str(folder / "line")
        self._loop, self._server = loop, await asyncio.start_unix_server(self._take_call, self.address)

    async def _take_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            rank = int(await _read(reader))
        except (ValueError, RankFailedError, EOFError, OSError):
            rank = -1
        if rank not in range(self._num_ranks):
            writer.close()
            return
        self._lines[rank] = reader, writer
        self.has_been_called = True
        if len(self._lines) == self._num_ranks:
            self._all_called.set()

    async def _wait_for_calls(self, ringing: asyncio.Future[None]) -> None:
        """Wait until every rank has called, or could not be told to."""
        calls = asyncio.ensure_future(self._all_called.wait())
        try:
            await asyncio.wait((calls, ringing), return_when=asyncio.FIRST_COMPLETED)
            if ringing.done() and not self._all_called.is_set():
                ringing.result()
                raise EOFError("it was told to call, and did not")
        finally:
            calls.cancel()

    async def _ask_one(self, rank: int, message: str) -> str:
        reader, writer = self._lines[rank]
        writer.write(_frame(message))
        await writer.drain()
        return await _read(reader)


class Line:
    """A rank's end.

    Args:
        address: Where the driver waits.
        rank: Who calls.
        timeout_s: Seconds to wait for the whole of a message.

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

    def hear(self) -> str:
        """The next message.

        Raises:
            RankFailedError: The driver hung up, or says nothing.
        """
        deadline_s = time.monotonic() + self._timeout_s
        size = _size_of(self._take(_HEADER_BYTES, deadline_s))
        return self._take(size, deadline_s).decode()

    def answer(self, message: str) -> None:
        """Say something.

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

    def _take(self, num_bytes: int, deadline_s: float) -> bytes:
        taken = bytearray()
        while len(taken) < num_bytes:
            try:
                self._socket.settimeout(max(deadline_s - time.monotonic(), 1e-3))
                part = self._socket.recv(min(num_bytes - len(taken), 1 << 20))
            except OSError as error:
                raise RankFailedError(f"the driver says nothing ({error})") from error
            if not part:
                raise RankFailedError("the driver hung up")
            taken += part
        return bytes(taken)


async def _read(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readexactly(_size_of(await reader.readexactly(_HEADER_BYTES)))).decode()
    except asyncio.IncompleteReadError as error:
        raise EOFError("it hung up") from error


def _frame(message: str) -> bytes:
    body = message.encode()
    return len(body).to_bytes(_HEADER_BYTES) + body


def _size_of(header: bytes) -> int:
    """How long the message is that `header` announces.

    Raises:
        RankFailedError: Longer than any that we send.
    """
    size = int.from_bytes(header)
    if size > _MAX_BYTES:
        raise RankFailedError(f"a message of {size} bytes was announced, which is none of ours")
    return size


def _private_folder() -> Path:
    """A new folder that only this user can open, with a path short enough for a socket's address."""
    folder = Path(tempfile.mkdtemp(prefix="fp8refit-"))
    if len(os.fsencode(folder)) > _MAX_PATH_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="fp8refit-", dir="/tmp"))
    return folder
