"""What an adapter contributes to the benchmark: an engine to boot, and other ways to give it new weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

from torch import Tensor

from fp8refit.bench.shapes import CHECKPOINTS, block_fp8
from fp8refit.driver.adapters import booting, find_adapter
from fp8refit.errors import UnsupportedEngineError


class Place(StrEnum):
    """Where an engine runs."""

    INSIDE = "inside"
    """In this process."""
    OUTSIDE = "outside"
    """Its ranks in other processes."""
    SERVER = "server"
    """Behind its own HTTP server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitBoot:
    """What an adapter's `bench.boot` has to boot."""

    model: Path
    """A folder with a `config.json`."""
    tp: int = 1
    """Tensor-parallel ranks."""
    quantization: str | None = None
    """How the engine is to quantize BF16 weights itself, in its own words, or one of `CHECKPOINTS`; None if it gets block-FP8
    checkpoints."""
    place: Place | None = None
    """None for the adapter's choice."""

    @property
    def is_online(self) -> bool:
        """Whether the engine quantizes BF16 weights itself."""
        return self.quantization is not None and self.quantization not in CHECKPOINTS

    @property
    def checkpoint(self) -> dict[str, object]:
        """The quantization entry of the checkpoints that it gets otherwise."""
        return block_fp8(self.model, self.quantization)


class Loads(StrEnum):
    """What an engine holds after a strategy."""

    POLICY = "policy"
    """The given one."""
    OTHER = "other"
    """Another, which is made of it."""
    NOTHING = "nothing"
    """What it held before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A way to give an engine new BF16 weights, other than `refit` of tensors at rest."""

    name: str
    """A word, by which the command line chooses it."""
    summary: str
    """One line: what it does and with which settings."""
    update: Callable[[Mapping[str, Tensor]], object]
    """Takes BF16 weights by checkpoint name; returns when the engine serves them, with its caches flushed."""
    prepare: Callable[[Mapping[str, Tensor]], object] = lambda _: None
    """What is not timed before each update, such as the trainer's own work."""
    undo: Callable[[], object] = lambda: None
    """What it leaves is taken away, not timed, before another way has its turn."""
    loads: Loads = Loads.POLICY
    is_on_request: bool = False
    """Whether it is left out unless its name is given."""
    num_untimed: int = 0
    """How often another policy comes the same way before each that is timed, so that nothing is compiled for that one."""


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
    """The engine's own ways, and those of trainers."""
    worker: object | None
    """What `fp8refit.update` takes, if the model is in this process."""


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


def open_bench_engine(name: str, wanted: RefitBoot) -> BenchEngine:
    """Boot an adapter's engine, using `boot` in its module `bench`.

    Raises:
        UnsupportedEngineError: As in `adapter_module` and `booting`; or the engine cannot be booted like that.
    """
    module = adapter_module(name, "bench")
    with booting(name, wanted.model):
        engine: BenchEngine = module.boot(wanted)
    return engine
