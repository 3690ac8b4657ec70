"""What scenarios ask of an engine under test, whatever the engine; nothing here imports one."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from fp8refit import RefitReport, VerifyReport


class Subject(Protocol):
    """One engine, driven and looked at. `tests/vllm/subject.py` and `tests/sglang/subject.py` have one each."""

    num_ranks: int

    def refit(self, source: Any, *, manifest: Any = None, calibration: Any = None, **options: Any) -> RefitReport: ...

    def verify(self, source: Any) -> VerifyReport:
        """Whether the engine holds a policy."""

    def look(self, what: str, *arguments: Any) -> list:
        """What each rank answers that this driver reaches."""

    def live(self) -> list[dict[str, str]]:
        """A sha256 for each live tensor of each rank."""

    def generate(self) -> list[dict]:
        """What the engine says to a few prompts, one after another."""

    def state(self) -> dict:
        """What every rank holds, and what the engine says with an empty cache."""

    def refused(self, call: Callable[..., object], *arguments: Any, **options: Any) -> dict | None:
        """Which error `call` raises, ours or not, how soon, and what it names; None if it returns."""

    @property
    def is_dirty(self) -> bool: ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def traces(self) -> list[str]:
        """What a refit left on the engine."""

    @property
    def entries(self) -> Mapping[str, Callable[[], object]]:
        """Every way in for a request."""


class UpdatedSubject(Subject, Protocol):
    """One that is updated from within its workers or schedulers."""

    def update(self, *what: Any) -> list:
        """As `look`, over caches that hold what was served, and once nothing runs."""

    def num_cached(self) -> list[int]:
        """Tokens that caches give to requests."""


def make_policy(family: str, seed: int) -> dict[str, Tensor]:
    """What a trainer's `state_dict` gives: for tied models the LM head too."""
    # Not where tests are collected: beside SGLang, what it imports needs `tests/stubs`.
    from tests.tiny_models import make_model

    return make_model(family, seed).state_dict()
