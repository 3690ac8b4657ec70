"""What an adapter contributes to the benchmark: an engine to boot, and other ways to give it new weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

from torch import Tensor

from fp8refit.driver.adapters import booting, find_adapter
from fp8refit.errors import UnsupportedEngineError


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A way other than fp8refit's to give an engine new BF16 weights."""

    name: str
    summary: str
    """One line: what it does and with which settings."""
    update: Callable[[Mapping[str, Tensor]], None]
    """Takes BF16 weights by checkpoint name; returns when the engine serves them, with its caches flushed."""
    prepare: Callable[[Mapping[str, Tensor]], None] = lambda _: None
    """The trainer's work beforehand, which is not timed."""


class LiveEngine(Protocol):
    """A live engine."""

    candidate: object
    """The object to pass to `Refitter`."""
    settings: dict[str, object]
    """The arguments it was booted with."""

    def close(self) -> None:
        """Stop the engine and everything it started."""
        ...


class BenchEngine(LiveEngine, Protocol):
    """A live engine with random weights."""

    strategies: Sequence[Strategy]


def adapter_module(name: str, part: str) -> ModuleType:
    """Import the module `part` of an adapter's package. Refits alone do not need it.

    Raises:
        UnsupportedEngineError: No adapter of that name is installed, or its package lacks the module.
    """
    module = f"{find_adapter(name).__module__.partition('.')[0]}.{part}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UnsupportedEngineError(
            f"the adapter {name} does not support this benchmark: it has no {module}"
        ) from error


def open_bench_engine(name: str, model: Path, *, tp: int, online: bool = False) -> BenchEngine:
    """Boot an adapter's engine from a folder with a `config.json`, using `boot` in its module `bench`.

    Args:
        name: Name of the adapter.
        model: The folder.
        tp: Tensor-parallel ranks.
        online: Use `boot_online` instead: an engine that quantizes BF16 checkpoints to block FP8 itself.

    Raises:
        UnsupportedEngineError: As in `adapter_module` and `booting`; or the engine cannot quantize by itself.
    """
    module = adapter_module(name, "bench")
    if online and not hasattr(module, "boot_online"):
        raise UnsupportedEngineError(f"{name} does not quantize BF16 weights to block FP8 itself; leave out --online")
    with booting(name, model):
        engine: BenchEngine = (module.boot_online if online else module.boot)(model, tp=tp)
    return engine
