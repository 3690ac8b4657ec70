"""What an adapter brings to the benchmark: an engine to boot, and the other ways to give it new weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fp8refit.engine import find_adapters, name_adapters
from fp8refit.errors import UnsupportedEngineError


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A way to move an engine to new BF16 weights that is not fp8refit's."""

    name: str
    summary: str
    """What it does, with which settings, in one line."""
    update: Callable[[Mapping[str, Tensor]], None]
    """Takes BF16 weights by checkpoint names, and returns when the engine serves them, its caches flushed."""
    prepare: Callable[[Mapping[str, Tensor]], None] = lambda _: None
    """What a trainer would have done before, not timed."""


class BenchEngine(Protocol):
    """A live engine with random weights."""

    candidate: object
    """For `Refitter`."""
    settings: dict[str, object]
    """What it was booted with."""
    strategies: Sequence[Strategy]

    def close(self) -> None:
        """End it, and everything that it started."""
        ...


def open_bench_engine(name: str, model: Path, *, tp: int) -> BenchEngine:
    """Boot the engine of an adapter from a folder with a `config.json`.

    Raises:
        UnsupportedEngineError: No adapter of that name is installed, or it takes no part in benchmarks.
    """
    adapters, broken = find_adapters()
    if name not in adapters:
        raise UnsupportedEngineError(f"no adapter is called {name!r}; installed are {name_adapters(adapters)}", broken)
    boot = getattr(adapters[name], "boot_for_bench", None)
    if boot is None:
        raise UnsupportedEngineError(f"the adapter {name} has no `boot_for_bench`, and so no benchmark")
    engine: BenchEngine = boot(model, tp=tp)
    return engine
