"""How the ranks of a trainer agree on what they gather: before the first collective operation, at each, and after the last.

Each rank says where it is, every rank hears every other, and all of them go on or all of them raise the same error.
"""

from typing import Literal, TypeAlias

import torch
import torch.distributed
from pydantic import BaseModel, ConfigDict
from torch.distributed import ProcessGroup

from fp8refit.errors import EngineLostError, RankFailedError, RefitError
from fp8refit.relay import Holding
from fp8refit.transport.group import ProcessGroupExchange
from fp8refit.vote import ErrorRecord, Group, SoloGroup, merge_errors

Step: TypeAlias = Literal["plan", "read", "batch", "end", "done", "follow", "names"]


class Statement(BaseModel):
    """What one rank says at one step."""

    model_config = ConfigDict(frozen=True)

    step: Step
    """`plan`: it wants to know what there is; `read`: to gather all of it; `batch`, `end`: it is in the middle or at the end of
    that; `done`: it will gather no more; `follow`: it does what the others do."""
    place: int = 0
    """Number of the batch."""
    max_bytes: int = 0
    digest: str = ""
    """Of all that is gathered."""
    names: tuple[str, ...] = ()
    """All that is gathered, one line each: said once digests turned out to differ."""
    holdings: tuple[Holding, ...] = ()
    """All that this rank holds, where ranks may hold different tensors."""
    error: ErrorRecord | None = None


class Trainers:
    """The ranks of one trainer while they gather one state dict. Every rank makes the same calls in the same order.

    Args:
        group: How they reach each other.
        timeout_s: Seconds to wait for the others at each step.

    Attributes:
        is_over: Whether no rank will gather any more: all are done, or all have heard of an error.
    """

    def __init__(self, group: Group, *, timeout_s: float) -> None:
        self._group = group
        self.timeout_s = timeout_s
        self.is_over = False

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return self._group.size

    def hear(self, own: Statement, error: BaseException | None = None) -> list[Statement]:
        """Say `own`, or what went wrong, and hear every rank, in order of rank.

        Raises:
            RefitError: The ranks' errors as one; RankFailedError if a rank died, or did not come in time, or is elsewhere.
            BaseException: `error` itself, if it is none of ours.
        """
        if self.is_over:
            raise RankFailedError(
                "this state dict is not gathered any more; make a new one on every rank of the trainer"
            )
        if error is not None:
            own = own.model_copy(update={"error": ErrorRecord.of(error)})
        try:
            heard = self._exchange(own)
            failed = {rank: said.error for rank, said in enumerate(heard) if said.error is not None}
            if error is not None and not isinstance(error, RefitError):
                raise error
            if failed:
                raise merge_errors(failed, num_ranks=len(heard)) from error
            _check_are_in_step(heard)
        except BaseException:
            self.is_over = True
            raise
        return heard

    def _exchange(self, own: Statement) -> list[Statement]:
        try:
            messages = self._group.exchange(own.model_dump_json().encode(), timeout_s=self.timeout_s)
        except EngineLostError as error:
            raise RankFailedError(
                f"rank {self._group.rank} of {self._group.size} of the trainer was at {own.step!r} and did not hear from every "
                f"other rank within {self.timeout_s:g} s, or one of them died. Every rank of the trainer has to take part: in "
                "refit where each has an engine, else in fp8refit.gathered(...), joined or left as a context by those that do "
                "not refit"
            ) from error
        return [Statement.model_validate_json(message) for message in messages]


def _check_are_in_step(heard: list[Statement]) -> None:
    """Hold that all ranks do the same, or follow.

    Raises:
        RankFailedError: They do not.
    """
    places = {(said.step, said.place) for said in heard if said.step != "follow"}
    if len(places) > 1:
        steps = ", ".join(f"rank {rank} is at {said.step!r} {said.place}" for rank, said in enumerate(heard))
        raise RankFailedError(
            f"the ranks of the trainer are out of step: {steps}. All of them have to read the state dict alike, or join"
        )


def trainer_group(group: ProcessGroup | None) -> Group:
    """The ranks of `group` (of the default one, if there is any), over whatever device it communicates from."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return SoloGroup()
    group = group if group is not None else torch.distributed.group.WORLD
    assert group is not None, "initialized"
    if torch.distributed.get_world_size(group) == 1:
        return SoloGroup()
    devices = [part.partition(":")[0] for part in torch.distributed.get_backend_config(group).split(",")]
    return ProcessGroupExchange(
        group, torch.device("cpu") if "cpu" in devices else torch.empty(0, device=devices[0]).device
    )
