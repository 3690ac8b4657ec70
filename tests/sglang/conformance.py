"""SGLang as `fp8refit.testing` wants to see it: `generate`, which drives the engine's loop, and `async_generate` in one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engines
import sglang
from engines import ASKED, NOISE, PROMPTS, bf16_of, boot, make_policy, said
from expected import expected_bytes
from observer import tensor_bytes
from torch import Tensor

from fp8refit import testing
from fp8refit.testing import run_checks


class Looks:
    """What both kinds of subject say of an engine of one rank."""

    engine: sglang.Engine
    family: str
    _booted: dict[str, str]
    _hidden_at_boot: set[str]

    def policy(self, seed: int) -> dict[str, Tensor]:
        return make_policy(self.family, seed)

    def look(self, what: str, *arguments: Any) -> Any:
        (found,) = engines.look(self.engine, what, *arguments)
        return found

    def live_bytes(self) -> dict[str, str]:
        return self.look("live_bytes")

    def places(self) -> dict[str, list]:
        return self.look("places")

    def expected_bytes(self, policy: dict[str, Tensor]) -> dict[str, str]:
        shapes = {name: place[2] for name, place in self.places().items()}
        return expected_bytes(policy, shapes, self._booted)

    def drop_caches(self) -> None:
        engines.drop_caches(self.engine)

    def num_unfinished(self) -> int:
        return engines.num_unfinished(self.engine)

    def traces(self) -> list[str]:
        return sorted(engines.traces(self.engine) - self._hidden_at_boot)

    def memory_bytes(self) -> int:
        return tensor_bytes() + self.look("tensor_bytes")

    @contextmanager
    def unflushable(self) -> Iterator[None]:
        self.look("keep_caches", True)
        try:
            yield
        finally:
            self.look("keep_caches", False)

    def remember_boot(self) -> None:
        self._booted, self._hidden_at_boot = self.live_bytes(), engines.traces(self.engine)


class EngineSubject(Looks, testing.Subject):
    """An `sglang.Engine` that is used by `generate`."""

    def __init__(self, model: Path, family: str) -> None:
        self.engine, self.family = boot(model, **NOISE), family
        self.remember_boot()

    def generate(self) -> list[dict]:
        return engines.generate(self.engine)

    @contextmanager
    def busy(self) -> Iterator[Callable[[], dict]]:
        stream = self.engine.generate(input_ids=PROMPTS[-1], stream=True, **ASKED)
        outputs = [next(stream)]

        def finish() -> dict:
            outputs.extend(stream)
            return said(outputs[-1])

        try:
            yield finish
        finally:
            finish()


class AsyncEngineSubject(Looks, testing.AsyncSubject):
    """An `sglang.Engine` that is used by `async_generate`. It waits for its requests, and so is never busy."""

    def __init__(self, model: Path, family: str) -> None:
        super().__init__()
        self.family = family
        self.engine = self.run(self._boot(model))
        self.remember_boot()

    async def _boot(self, model: Path) -> sglang.Engine:
        return boot(model, **NOISE)

    def generate(self) -> list[dict]:
        return [self.run(self._answer(prompt)) for prompt in PROMPTS]

    async def _answer(self, prompt: list[int]) -> dict:
        return said(await self.engine.async_generate(input_ids=prompt, **ASKED))


def run_conformance(kind: str, family: str, work: Path) -> list[dict]:
    """Every check of the kit on one engine."""
    subject = KINDS[kind](bf16_of(family, 1, work), family)
    results = [{"name": r.name, "outcome": r.outcome, "message": r.message} for r in run_checks(subject)]
    subject.engine.shutdown()
    return results


KINDS = {"generate": EngineSubject, "async_generate": AsyncEngineSubject}
