"""How the ranks of an engine agree on a step: each tries it, and a vote makes the error of one rank the error of all."""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fp8refit.config import Job, RefitConfig
from fp8refit.errors import EngineLostError, UnsupportedEngineError
from fp8refit.ranks.held_names import HeldNames
from fp8refit.ranks.target import Target
from fp8refit.transport.vote import Ballot, Group, Phase, vote

T = TypeVar("T")


class Agreement:
    """One rank's part in the votes of its group. After a vote that failed, nothing is prepared.

    Args:
        target: This rank.
        group: All ranks of the engine.

    Attributes:
        names: Which checkpoint names each rank holds.
    """

    def __init__(self, target: Target, group: Group) -> None:
        self.target, self.group = target, group
        self.names = HeldNames()

    def attempt(self, step: Callable[[], T]) -> tuple[BaseException | None, T | None]:
        """Run `step`, and catch its error for the vote; a single rank just raises."""
        if self.group.size == 1:
            return None, step()
        try:
            return None, step()
        except BaseException as error:  # noqa: BLE001 - every error has to reach the vote; `vote` raises it again
            return error, None

    def vote(self, phase: Phase, error: BaseException | None, config: RefitConfig, **said: Any) -> list[Ballot]:
        """Exchange ballots; see `fp8refit.transport.vote.vote`."""
        ballot = Ballot(phase=phase, version=self.target.version, **said)
        try:
            return vote(self.group, ballot, error, timeout_s=config.timeout_s)
        except BaseException as verdict:
            self.target.abandon(error)
            if isinstance(verdict, EngineLostError) and self.group.size > 1:
                self.target.live.lost_because = str(verdict)
            raise

    def on_ready(self, job: Job, driver_error: BaseException | None) -> list[Ballot]:
        """Agree that every rank is ready. Nothing is written."""
        error, _ = self.attempt(lambda: self.check_ready(job, driver_error))
        return self.vote("ready", error, job.config, **self.wanted(job))

    def check_ready(self, job: Job, driver_error: BaseException | None) -> None:
        """Check that this rank can be written now, and its KV scales set, if the job says to. Gives up an unfinished
        refit.
        """
        if driver_error is not None:
            raise driver_error
        inventory = self.target.check_ready()
        self.target.abandon()
        if job.config.prove_trace:
            self.target.check_proved()
        if self.group.size > 1:
            self.names.note(inventory)
        if job.kv is not None:
            self.target.live.require_kv().check(job.kv, job.config.kv)

    def wanted(self, job: Job) -> dict[str, str]:
        """What a ballot says about this rank's names and its driver's request; empty for a single rank."""
        if self.group.size == 1:
            return {}
        asked = hashlib.sha256(job.model_dump_json().encode()).hexdigest()
        return {"held": self.names.digest, "asked": asked}

    def learn_names(self, ready: Sequence[Ballot], config: RefitConfig) -> None:
        """Learn which names the other ranks hold, from their ballots.

        Raises:
            UnsupportedEngineError: All ranks together do not read some tensor whole. Raised on every rank.
        """
        try:
            self.names.learn(ready, partial(self.vote, "names", None, config))
        except UnsupportedEngineError:
            self.target.abandon()
            raise
