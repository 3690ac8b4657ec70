"""One engine under test, driven and looked at as scenarios of every engine ask for it (`tests/engines/subject.py`)."""

import time
from collections.abc import Callable
from typing import Any

import engines
import sglang
from engines import PROMPTS, SAMPLING, look

from fp8refit import RefitReport, Refitter, VerifyReport
from fp8refit.live.layout import EngineLayout


class Subject:
    """An `sglang.Engine`."""

    def __init__(self, engine: sglang.Engine) -> None:
        self.engine = engine
        self.num_ranks = engines.num_ranks_of(engine)
        self._hidden_at_boot = engines.traces(engine)

    def refit(self, source: Any, *, manifest: Any = None, calibration: Any = None, **options: Any) -> RefitReport:
        return Refitter(self.engine, **options).refit(source, manifest=manifest, calibration=calibration)

    def verify(self, source: Any) -> VerifyReport:
        return Refitter(self.engine).verify(source)

    def layout(self) -> EngineLayout:
        return Refitter(self.engine).layout()

    def look(self, what: str, *arguments: Any) -> list:
        return look(self.engine, what, *arguments)

    def live(self) -> list[dict[str, str]]:
        return self.look("live_bytes")

    def generate(self) -> list[dict]:
        return engines.generate(self.engine)

    def state(self) -> dict:
        return engines.state(self.engine)

    def refused(self, call: Callable[..., object], *arguments: Any, **options: Any) -> dict | None:
        return refused(lambda: call(*arguments, **options))

    @property
    def is_dirty(self) -> bool:
        return Refitter(self.engine).is_dirty

    @property
    def num_unfinished(self) -> int:
        return engines.num_unfinished(self.engine)

    @property
    def traces(self) -> list[str]:
        return sorted(engines.traces(self.engine) - self._hidden_at_boot)

    @property
    def entries(self) -> dict[str, Callable[[], object]]:
        engine, prompt = self.engine, {"input_ids": PROMPTS[0], "sampling_params": SAMPLING}
        return {
            "generate": lambda: engine.generate(**prompt),
            "stream": lambda: list(engine.generate(**prompt, stream=True)),
            "async_generate": lambda: engine.loop.run_until_complete(engine.async_generate(**prompt)),
        }

    def update(self, *what: Any) -> list:
        if self.refused(self.generate) is None:
            while not all(self.look("is_idle")):  # a rank notices a little later that its last request is over
                pass
        return self.look(*what)

    def num_cached(self) -> list[int]:
        return [output["num_cached"] for output in self.generate()]


def refused(call: Callable[[], object]) -> dict | None:
    """Which error `call` raises, how soon, and what it names; None if it returns."""
    start_s = time.perf_counter()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever comes is what is found
        named = [getattr(error, field, ()) for field in ("names", "problems", "reasons")]
        return {
            "error": type(error).__name__,
            "message": str(error),
            "named": [line for lines in named for line in lines],
            "seconds": time.perf_counter() - start_s,
        }
    return None
