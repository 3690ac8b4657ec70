"""What an adapter brings to the benchmark: an engine to boot, and the other ways to give it new weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

from torch import Tensor

from fp8refit.engine import booting, find_adapter
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


def adapter_module(name: str, part: str) -> ModuleType:
    """The module `part` of the package of an adapter, imported now: who only refits does without it.

    Raises:
        UnsupportedEngineError: No adapter of that name is installed, or its package has no such module.
    """
    module = f"{find_adapter(name).__module__.partition('.')[0]}.{part}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UnsupportedEngineError(
            f"the adapter {name} takes no part in this benchmark: it has no {module}"
        ) from error


def open_bench_engine(name: str, model: Path, *, tp: int, online: bool = False) -> BenchEngine:
    """Boot the engine of an adapter, by `boot` of its module `bench`, from a folder with a `config.json`.

    Args:
        name: Of the adapter.
        model: The folder.
        tp: Tensor-parallel ranks.
        online: Whether by `boot_online` instead: as an engine that quantizes BF16 checkpoints to block FP8 itself.

    Raises:
        UnsupportedEngineError: See `adapter_module` and `booting`; or the engine does not quantize by itself.
    """
    module = adapter_module(name, "bench")
    if online and not hasattr(module, "boot_online"):
        raise UnsupportedEngineError(f"{name} does not quantize BF16 weights to block FP8 itself; leave out --online")
    with booting(name, model):
        engine: BenchEngine = (module.boot_online if online else module.boot)(model, tp=tp)
    return engine
