"""A checkpoint sent into running servers, for the command line: each reads it itself where it can; else it is read here."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.engine import connect
from fp8refit.errors import RefitError
from fp8refit.refitter import Refitter
from fp8refit.report import RefitReport
from fp8refit.served import as_stream
from fp8refit.sources import SafetensorsSource
from fp8refit.transport.http import Server

OnProgress = Callable[[str, int, int], None]
"""Called with the URL of a server, bytes read for it, and bytes in all."""


class Pushed(BaseModel):
    """What came of a push to one server."""

    model_config = ConfigDict(frozen=True)

    url: str
    engine: str
    read_by: Literal["server", "driver"]
    """Who read the checkpoint: the server's own ranks, or this process, which handed it over."""
    seconds: float
    report: RefitReport | None = None
    error: str | None = None
    """Why there is no report."""


class PushResult(BaseModel):
    """What came of a push. `model_dump_json()` is what `--json` writes."""

    model_config = ConfigDict(frozen=True)

    checkpoint: str
    num_bytes: int
    servers: tuple[Pushed, ...]

    @property
    def failed(self) -> tuple[Pushed, ...]:
        """Servers that do not hold the checkpoint now."""
        return tuple(pushed for pushed in self.servers if pushed.error is not None)


def push_checkpoint(
    checkpoint: Path, urls: Sequence[str], config: RefitConfig, *, on_progress: OnProgress = lambda *_: None
) -> PushResult:
    """Refit every server to a checkpoint, all at once. Each takes it wholly or not at all; what failed is in the result.

    Args:
        checkpoint: A safetensors file or folder.
        urls: Of the servers.
        config: How to refit.
        on_progress: Told of bytes that are read.

    Raises:
        InvalidSourceError: The checkpoint cannot be read. Nothing was sent.
        EngineLostError: A server cannot be reached. Nothing was sent to any.
        UnsupportedEngineError: A server is none that can be refitted. Nothing was sent to any.
    """
    source = SafetensorsSource(checkpoint.resolve())
    num_bytes = sum(prod(meta.shape) * meta.dtype.itemsize for meta in source.metadata.values())
    servers = [connect(url) for url in dict.fromkeys(url.rstrip("/") for url in urls)]
    refitters = [Refitter(server, config) for server in servers]

    def push(server: Server, refitter: Refitter) -> Pushed:
        return _push(source, num_bytes, server, refitter, on_progress)

    with ThreadPoolExecutor(len(servers)) as pool:
        pushed = tuple(pool.map(push, servers, refitters))
    return PushResult(checkpoint=str(checkpoint), num_bytes=num_bytes, servers=pushed)


def _push(
    source: SafetensorsSource, num_bytes: int, server: Server, refitter: Refitter, on_progress: OnProgress
) -> Pushed:
    start_s = time.perf_counter()
    is_seen, report, error = True, None, None
    try:
        is_seen = server.sees(str(source.path))
        if is_seen or not server.is_here:
            report = refitter.refit(source.path)
        else:
            on_read = partial(on_progress, server.url)
            report = refitter.refit(lambda: _counted(source, num_bytes, on_read), manifest=source.metadata)
        refitter.close()
        on_progress(server.url, num_bytes, num_bytes)
    except RefitError as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Pushed(
        url=server.url,
        engine=server.engine,
        read_by="server" if is_seen else "driver",
        seconds=time.perf_counter() - start_s,
        report=report,
        error=error,
    )


def _counted(
    source: SafetensorsSource, num_bytes: int, on_read: Callable[[int, int], None]
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor; tells after each how many bytes there were so far."""
    done = 0
    for name, tensor in as_stream(source):
        done += tensor.nbytes
        yield name, tensor
        on_read(done, num_bytes)
