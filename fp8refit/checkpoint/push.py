"""Sends a checkpoint to running servers.

With `auto`, each server reads it itself if it can; otherwise this process reads it. With `collective`, this process reads
it and broadcasts it to all of them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, Unpack

from pydantic import BaseModel
from torch import Tensor

from fp8refit.config import Options, RefitConfig, Transport, choose_config
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
    engine: str | None = None
    """None if there is no server that can be refitted."""
    read_by: Literal["server", "driver"] | None = None
    """Who read the checkpoint: the server's ranks, or this process, which passed it on; None if neither."""
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
    checkpoint: Path | str,
    urls: Sequence[str],
    config: RefitConfig | None = None,
    *,
    on_progress: OnProgress = lambda *_: None,
    **options: Unpack[Options],
) -> PushResult:
    """Refit every server to a checkpoint, all at once. Failures are part of the result, also of servers that do not answer.

    Each server takes the checkpoint completely or not at all. With `transport="collective"`, all do or none does.

    Args:
        checkpoint: A safetensors file or folder.
        urls: URLs of the servers.
        config: How to refit; or pass its fields as keywords.
        on_progress: Called as bytes are read.
        **options: Fields of the config; see `Refitter`.

    Raises:
        InvalidSourceError: The checkpoint cannot be read. Nothing was sent.
        InvalidOptionError: An option is unknown or invalid. Nothing was sent.
    """
    config, source = choose_config(config, options), SafetensorsSource(Path(checkpoint).resolve())
    urls = list(dict.fromkeys(url.rstrip("/") for url in urls))
    with ThreadPoolExecutor(max(1, len(urls))) as pool:
        servers = list(pool.map(_reach, urls))
        if config.transport == "collective":
            pushed = _push_together(source, urls, servers, config, on_progress)
        else:
            pushed = list(pool.map(partial(_push, source, config, on_progress), urls, servers))
    return PushResult(
        checkpoint=str(checkpoint), num_bytes=_num_bytes(source), transport=config.transport, servers=tuple(pushed)
    )


def _reach(url: str) -> Server | RefitError:
    """The server, or why it cannot be refitted."""
    try:
        server = connect(url)
        attach_engine(server)
    except RefitError as error:
        return error
    return server


def _push_together(
    source: SafetensorsSource,
    urls: Sequence[str],
    servers: Sequence[Server | RefitError],
    config: RefitConfig,
    on_progress: OnProgress,
) -> list[Pushed]:
    def on_read(done: int, total: int) -> None:
        for url in urls:
            on_progress(url, done, total)

    start_s, report, error = time.perf_counter(), None, None
    if absent := [url for url, server in zip(urls, servers, strict=True) if isinstance(server, RefitError)]:
        error = f"nothing was sent to any server, because of {', '.join(absent)}"
    else:
        try:
            with Broadcaster(servers, config=config) as broadcaster:
                report = broadcaster.push(_Counted(source, on_read))
        except RefitError as failure:
            error = _describe(failure)
    seconds = time.perf_counter() - start_s
    return [_pushed(url, server, "driver", seconds, report, error) for url, server in zip(urls, servers, strict=True)]


def _push(
    source: SafetensorsSource, config: RefitConfig, on_progress: OnProgress, url: str, server: Server | RefitError
) -> Pushed:
    start_s, num_bytes = time.perf_counter(), _num_bytes(source)
    is_seen, report, error = True, None, None
    if isinstance(server, Server):
        try:
            refitter = Refitter(server, config)
            is_seen = config.rename is None and server.sees(str(source.path))
            if is_seen or not server.is_here:
                report = refitter.refit(source.path)
            else:
                report = refitter.refit(_Counted(source, partial(on_progress, url)))
            refitter.close()
            on_progress(url, num_bytes, num_bytes)
        except RefitError as failure:
            error = _describe(failure)
    return _pushed(url, server, "server" if is_seen else "driver", time.perf_counter() - start_s, report, error)


def _pushed(
    url: str,
    server: Server | RefitError,
    read_by: Literal["server", "driver"],
    seconds: float,
    report: RefitReport | None,
    error: str | None,
) -> Pushed:
    if isinstance(server, RefitError):
        return Pushed(url=url, seconds=seconds, error=_describe(server))
    is_dirty = attach_engine(server).engine.ranks.is_dirty
    return Pushed(
        url=url, engine=server.engine, read_by=read_by, seconds=seconds, report=report, error=error, is_dirty=is_dirty
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
