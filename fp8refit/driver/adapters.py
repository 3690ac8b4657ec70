"""Finds installed adapters. They register in the entry-point group `fp8refit.engines`; the core never imports an engine."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from textwrap import shorten

from fp8refit.driver.engine import Adapter
from fp8refit.driver.router import behind
from fp8refit.errors import RefitError, UnsupportedEngineError
from fp8refit.remote.servers.http_client import Server

ENTRY_POINT_GROUP = "fp8refit.engines"


def connect(url: str, *, api_key: str | None = None, token: str | None = None) -> Server:
    """Find out which engine's server listens at `url`.

    Args:
        url: Such as `http://127.0.0.1:8000`.
        api_key: See `fp8refit.remote.servers.http_client.Server`.
        token: See there.

    Raises:
        EngineLostError: No server answers.
        UnsupportedEngineError: No installed adapter knows the server, it is a router, or it requires another API key.
    """
    adapters, broken = find_adapters()
    kinds: dict[str, type[Server]] = {
        name: adapter.server for name, adapter in adapters.items() if hasattr(adapter, "server")
    }
    servers = [kind(url, api_key=api_key, token=token) for kind in kinds.values()]
    found = next((server for server in servers if server.recognise()), None)
    urls = behind(found or servers[-1]) if servers else None
    if urls is not None:  # it would pass each order to another server
        raise UnsupportedEngineError(
            f"{url} is a router, with {len(urls)} servers behind it ({shorten(', '.join(urls), 120)}); name these, or pass "
            "Broadcaster(router=...), which refits all of them together"
        )
    if found is not None:
        return found
    raise UnsupportedEngineError(
        f"{url} is no server of an engine that an installed adapter knows ({name_adapters(kinds)}); pass its root, without /v1",
        broken,
    )


def find_adapters() -> tuple[dict[str, type[Adapter]], list[str]]:
    """Every installed adapter by name, and one line per adapter that cannot be imported."""
    adapters, broken = {}, []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            adapters[point.name] = point.load()
        except ImportError as error:
            broken.append(f"the adapter {point.name} cannot be imported: {error}")
    return adapters, broken


def find_adapter(name: str) -> type[Adapter]:
    """The installed adapter called `name`.

    Raises:
        UnsupportedEngineError: There is none.
    """
    adapters, broken = find_adapters()
    if name not in adapters:
        raise UnsupportedEngineError(f"no adapter is called {name!r}; installed are {name_adapters(adapters)}", broken)
    return adapters[name]


@contextmanager
def booting(engine: str, model: object, *, act: str = "boot") -> Iterator[None]:
    """Wrap an engine's own code, which raises all kinds of errors for models and settings that it does not know.

    Raises:
        UnsupportedEngineError: It raised an error, which the message quotes.
    """
    try:
        yield
    except RefitError:
        raise
    except Exception as error:
        raise UnsupportedEngineError(f"{engine} cannot {act} {model}: {type(error).__name__}: {error}") from error


def name_adapters(adapters: Iterable[str]) -> str:
    """The names, for a message."""
    return ", ".join(sorted(adapters)) or "none: install fp8refit, a path alone has no entry points"
