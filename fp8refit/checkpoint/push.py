"""Sends a checkpoint to running servers.

With `auto`, each server reads it itself if it can; otherwise this process reads it. With `collective`, this process reads
it and broadcasts it to all of them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import BaseModel
from torch import Tensor

from fp8refit.config import RefitConfig, Transport
from fp8refit.driver.adapters import connect
from fp8refit.driver.attach import attach_engine
from fp8refit.driver.broadcaster import Broadcaster
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import RefitError
from fp8refit.live.slots import TensorMeta
from fp8refit.remote.servers.http_client import Server
from fp8refit.report import RefitReport
from fp8refit.sources.checkpoints import SafetensorsSource

OnProgress = Callable[[str, int, int], None]
"""Called with a server's URL, bytes read for it, and total bytes."""


class Pushed(BaseModel, frozen=True):
    """The result of a push to one server."""

    url: str
    engine: str
    read_by: Literal["server", "driver"]
    """Who read the checkpoint: the server's ranks, or this process, which passed it on."""
    seconds: float
    report: RefitReport | None = None
    """After a broadcast, one report for all servers."""
    error: str | None = None
    """Why there is no report."""
    is_dirty: bool = False
    """Whether requests are refused, as far as known: the server was written in part, or is lost."""


class PushResult(BaseModel, frozen=True):
    """The result of a push. `--json` writes its `model_dump_json()`."""

    checkpoint: str
    num_bytes: int
    transport: Transport
    """`collective` if all servers had to commit together."""
    servers: tuple[Pushed, ...]

    @property
    def failed(self) -> tuple[Pushed, ...]:
        """Servers that do not hold the checkpoint."""
        return tuple(pushed for pushed in self.servers if pushed.error is not None)


def push_checkpoint(
    checkpoint: Path, urls: Sequence[str], config: RefitConfig, *, on_progress: OnProgress = lambda *_: None
) -> PushResult:
    """Refit every server to a checkpoint, all at once. Failures are part of the result.

    Each server takes the checkpoint completely or not at all. With `config.transport="collective"`, all do or none does.

    Args:
        checkpoint: A safetensors file or folder.
        urls: URLs of the servers.
        config: How to refit.
        on_progress: Called as bytes are read.

    Raises:
        InvalidSourceError: The checkpoint cannot be read. Nothing was sent.
        EngineLostError: A server cannot be reached. Nothing was sent to any.
        UnsupportedEngineError: A server cannot be refitted. Nothing was sent to any.
    """
    source = SafetensorsSource(checkpoint.resolve())
    servers = [connect(url) for url in dict.fromkeys(url.rstrip("/") for url in urls)]
    push = _push_together if config.transport == "collective" else _push_apart
    return PushResult(
        checkpoint=str(checkpoint),
        num_bytes=_num_bytes(source),
        transport=config.transport,
        servers=tuple(push(source, servers, config, on_progress)),
    )


def _push_together(
    source: SafetensorsSource, servers: Sequence[Server], config: RefitConfig, on_progress: OnProgress
) -> Iterator[Pushed]:
    def on_read(done: int, total: int) -> None:
        for server in servers:
            on_progress(server.url, done, total)

    start_s, report, error = time.perf_counter(), None, None
    broadcaster = Broadcaster(servers, config=config)
    try:
        with broadcaster:
            report = broadcaster.push(_Counted(source, on_read))
    except RefitError as failure:
        error = _describe(failure)
    seconds = time.perf_counter() - start_s
    for server in servers:
        yield Pushed(
            url=server.url,
            engine=server.engine,
            read_by="driver",
            seconds=seconds,
            report=report,
            error=error,
            is_dirty=attach_engine(server).engine.ranks.is_dirty,
        )


def _push_apart(
    source: SafetensorsSource, servers: Sequence[Server], config: RefitConfig, on_progress: OnProgress
) -> Iterable[Pushed]:
    refitters = [Refitter(server, config) for server in servers]
    with ThreadPoolExecutor(len(servers)) as pool:
        return list(pool.map(lambda server, refitter: _push(source, server, refitter, on_progress), servers, refitters))


def _push(source: SafetensorsSource, server: Server, refitter: Refitter, on_progress: OnProgress) -> Pushed:
    start_s, num_bytes = time.perf_counter(), _num_bytes(source)
    is_seen, report, error = True, None, None
    try:
        is_seen = refitter.config.rename is None and server.sees(str(source.path))
        if is_seen or not server.is_here:
            report = refitter.refit(source.path)
        else:
            report = refitter.refit(_Counted(source, partial(on_progress, server.url)))
        refitter.close()
        on_progress(server.url, num_bytes, num_bytes)
    except RefitError as failure:
        error = _describe(failure)
    return Pushed(
        url=server.url,
        engine=server.engine,
        read_by="server" if is_seen else "driver",
        seconds=time.perf_counter() - start_s,
        report=report,
        error=error,
        is_dirty=refitter.is_dirty,
    )


class _Counted:
    """A checkpoint that reports, after each tensor, bytes read so far and total bytes."""

    is_repeatable = True

    def __init__(self, files: SafetensorsSource, on_read: Callable[[int, int], None]) -> None:
        self._files, self._on_read = files, on_read
        self._num_bytes = _num_bytes(files)

    def scan(self) -> tuple[Mapping[str, TensorMeta], Sequence[str]]:
        """Return metadata and problems, from the headers."""
        return self._files.scan()

    def pick(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        """Read the tensors with these names."""
        return self._files.pick(names)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Read one tensor after another.

        Raises:
            InvalidSourceError: A file changed since it was opened.
        """
        done = 0
        for name, tensor in self._files:
            done += tensor.nbytes
            yield name, tensor
            self._on_read(done, self._num_bytes)


def _num_bytes(source: SafetensorsSource) -> int:
    return sum(meta.num_bytes for meta in source.metadata.values())


def _describe(error: RefitError) -> str:
    """Return the error's type, message and server."""
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
