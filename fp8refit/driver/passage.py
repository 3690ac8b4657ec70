"""Passes orders on to the process that carries them out, if several processes take requests for one server.

All of them have one parent. Each checks the other's, so that nobody else gives or receives orders.
"""

import asyncio
import os
import re
import socket
import struct
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from pathlib import Path

from fp8refit.errors import RankFailedError
from fp8refit.remote.servers.orders import MAX_BYTES, MAX_ORDER_BYTES, Answer

_STARTS_WITHIN_S, _LOOK_S = 30.0, 0.1
_SIZE = struct.Struct(">Q")
_CREDENTIALS = struct.Struct("3i")
_PARENT = re.compile(r"^PPid:\s*(\d+)$", re.MULTILINE)


class Passage:
    """The way from the processes of a server to the one that carries out orders.

    Args:
        name: Of the server among those of this process's parent.
    """

    def __init__(self, name: str) -> None:
        self._address = f"\0fp8refit-{os.getppid()}-{name}"  # Linux keeps it as long as somebody listens
        self._server: asyncio.Server | None = None

    async def open(self, answer: Callable[[str], Awaitable[Answer]]) -> None:
        """Carry out the orders of the other processes from now on.

        Args:
            answer: Carries out an order.
        """

        async def take(reader: StreamReader, writer: StreamWriter) -> None:
            try:
                _check_is_ours(writer)
                await _send(writer, (await answer(await _receive(reader, MAX_ORDER_BYTES))).model_dump_json())
            finally:
                writer.close()

        listener = socket.socket(socket.AF_UNIX)  # uvloop takes no abstract address
        listener.bind(self._address)
        self._server = await asyncio.start_unix_server(take, sock=listener)

    async def pass_on(self, message: str) -> Answer:
        """Have an order carried out, and return the answer.

        Raises:
            RankFailedError: Nobody carries out orders.
        """
        reader, writer = await self._connect()
        try:
            _check_is_ours(writer)
            await _send(writer, message)
            return Answer.model_validate_json(await _receive(reader, MAX_BYTES))
        except (EOFError, OSError) as error:
            raise RankFailedError(f"the process of the server that carries out orders is gone ({error})") from error
        finally:
            writer.close()

    async def _connect(self) -> tuple[StreamReader, StreamWriter]:
        """Connect to the process that carries out orders. It may start later than this one."""
        deadline_s = time.monotonic() + _STARTS_WITHIN_S
        while True:
            other = socket.socket(socket.AF_UNIX)
            try:
                other.connect(self._address)
                return await asyncio.open_unix_connection(sock=other)
            except OSError as error:
                other.close()
                if time.monotonic() > deadline_s:
                    raise RankFailedError(f"the server is not ready ({error}); refit later") from error
            await asyncio.sleep(_LOOK_S)


def _check_is_ours(writer: StreamWriter) -> None:
    other: socket.socket = writer.get_extra_info("socket")
    process, _, _ = _CREDENTIALS.unpack(other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    status = Path(f"/proc/{process}/status")
    parent = _PARENT.search(status.read_text()) if status.is_file() else None
    if parent is None or int(parent[1]) != os.getppid():
        raise RankFailedError(f"process {process}, which is none of this server, took part in its orders")


async def _send(writer: StreamWriter, said: str) -> None:
    data = said.encode()
    writer.write(_SIZE.pack(len(data)) + data)
    await writer.drain()


async def _receive(reader: StreamReader, most_bytes: int) -> str:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    if size > most_bytes:
        raise RankFailedError(f"an order or an answer has {size} bytes, which is more than {most_bytes}")
    return (await reader.readexactly(size)).decode()
