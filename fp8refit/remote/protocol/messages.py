"""The messages between a driver and its engine's ranks: validated JSON, no pickle, no tensors.

Every reply echoes its request's id, and every order after `Prepare` names its refit. Errors are values.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fp8refit.config import Job, Wait
from fp8refit.live.collector import collector_paused
from fp8refit.live.layout import EngineLayout
from fp8refit.report import KvReport, RankReport
from fp8refit.transport.collective.buckets import MAX_SECTIONS, WireTensor
from fp8refit.transport.collective.communicator import Meeting
from fp8refit.transport.memory.segment import Segment, TensorRef
from fp8refit.transport.stamps import FileStamp
from fp8refit.transport.vote import ErrorRecord

PROTOCOL = 18
"""Version of these messages; both sides must use the same."""
_MAX_PROBLEMS = 100
"""Further problems are only counted: pydantic's list of them takes a hundred times the size of the message."""


def first_problem(error: ValidationError) -> str:
    """Describe the first problem of a message, and count the others."""
    count = error.error_count()
    if count > _MAX_PROBLEMS:
        return f"{count} problems"
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'][:8]))}: {first['msg']}"[:500] + f" (1 of {count} problems)" * (count > 1)


class Message(BaseModel):
    """Base of all messages: immutable, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @collector_paused()
    def encode(self) -> str:
        """As JSON."""
        return self.model_dump_json(by_alias=True)


class Place(Message):
    """Where a process runs. Only processes in the same place can share memory and see each other die."""

    boot_id: str
    """Boot id of the host's kernel."""
    pid_namespace: int

    @classmethod
    def here(cls) -> "Place":
        """The place of this process."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(boot_id=boot_id, pid_namespace=Path("/proc/self/ns/pid").stat().st_ino)


class MappedTensors(Message):
    """A source whose tensors are in memory that the ranks can map."""

    kind: Literal["mapped"] = "mapped"
    digest: str
    segments: tuple[Segment, ...] = ()
    refs: tuple[TensorRef, ...] | None = None
    """None if these are the tensors of the last refit, identified by their digest."""
    problems: tuple[str, ...] = ()


class Files(Message):
    """A safetensors file or folder that every rank reads itself."""

    kind: Literal["files"] = "files"
    path: str
    stamps: tuple[FileStamp, ...]
    """The files that the driver checked, in order; no others are read."""


class Pushed(Message):
    """A source that the driver reads and sends part by part."""

    kind: Literal["pushed"] = "pushed"
    manifest: dict[str, tuple[tuple[int, ...], str]] | None
    """Shape and dtype of every tensor to come, if known."""
    problems: tuple[str, ...] = ()
    odd_scales: tuple[str, ...] = ()
    unfit: dict[str, str] = {}
    """Names of invalid KV scales, and why."""


class Broadcast(Message):
    """A source that the trainer broadcasts, in buckets whose layout both sides derive from this offer."""

    kind: Literal["broadcast"] = "broadcast"
    token: str
    """Token of the broadcast group."""
    digest: str
    """SHA-256 over the rest."""
    tensors: tuple[WireTensor, ...] | None
    """None if this is the offer of the last refit, identified by its digest."""
    sections: tuple[Annotated[int, Field(ge=0, lt=MAX_SECTIONS)], ...] = Field(default=(), max_length=1 << 16)
    """The section of each rank of the group except the trainer; empty if all get the same."""
    bucket_bytes: int = 0
    num_buckets: int = 0
    is_ahead: bool = False
    """Whether it is sent before `Take`, to a buffer for each bucket."""
    problems: tuple[str, ...] = ()
    odd_scales: tuple[str, ...] = ()
    unfit: dict[str, str] = {}
    """Names of invalid KV scales, and why."""

    @property
    def num_sections(self) -> int:
        """Number of sections."""
        return max(self.sections, default=-1) + 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        for tensor in self.tensors or ():
            if tensor.cut is not None and len(tensor.cut.spans) != self.num_sections:
                raise ValueError(
                    f"{tensor.name}: is cut for {len(tensor.cut.spans)} sections, but there are {self.num_sections}"
                )
        return self


class Do(Message):
    """An order without details: say who answers and in what state it is, read the inventory, describe it, compute a digest of
    the weights, or release everything except the engine itself.
    """

    step: Literal["hello", "read", "describe", "fingerprint", "close"]


class Prepare(Message):
    """Check a source; see `Rank.prepare`."""

    step: Literal["prepare"] = "prepare"
    refit: str
    """Id of this refit. An unfinished refit is abandoned."""
    job: Job
    source: Annotated[MappedTensors | Files | Pushed | Broadcast, Field(discriminator="kind")]
    keeps: tuple[Literal["tensors", "buckets"], ...] = ()
    """What stays mapped for later refits: tensors in place, and buckets of streams. The rank unmaps the rest: before it
    reads the source, or if that is mapped, after the write. A GPU cannot reclaim memory that is mapped."""
    is_under_way: bool = False
    """Whether the broadcast begins and `Take` follows: the first buckets, or all that are sent ahead, are received now."""

    @property
    def is_known(self) -> bool:
        """Whether the source has the layout of the last refit, according to the driver."""
        source = self.source
        return (source.kind == "mapped" and source.refs is None) or (
            source.kind == "broadcast" and source.tensors is None
        )


class RefitStep(Message):
    """A step of a prepared refit: write all of it and commit; get ready for parts, or write the last of them and commit; or
    drop what was prepared.
    """

    step: Literal["write", "begin", "finish", "abandon"]
    refit: str


class Run(Message):
    """The position of a run of rows in its tensor."""

    first_row: int = Field(ge=0)
    full_shape: tuple[int, ...] = Field(min_length=1)
    """Of the whole tensor."""


class Packed(Message):
    """The contents of one set of buckets. Not an order: it is sent through the ring of a `Stream`."""

    segments: tuple[Segment, ...]
    """All buckets of the trainer; the ranks unmap others."""
    refs: tuple[TensorRef, ...]
    runs: dict[str, Run] = {}
    """The tensors that are runs of rows. The runs of one tensor arrive in order."""


class Stream(Message):
    """Write what arrives through a ring, until nothing more does; see `fp8refit.remote.host.stream_sender`.

    If the ring says that the stream is over, finish, as `RefitStep` orders.
    """

    step: Literal["stream"] = "stream"
    refit: str
    ring: Segment
    begins: bool = False
    """Whether to get ready for parts first, as `RefitStep` orders."""


class Join(Message):
    """Join the group that a trainer broadcasts in, and leave the last one; see `Communicator.join`."""

    step: Literal["join"] = "join"
    meeting: Meeting
    first_rank: int
    """Rank in the group of this engine's rank 0."""
    timeout_s: Wait


class Take(Message):
    """Receive and write all buckets of a broadcast, and commit; see `Receiver.take`."""

    step: Literal["take"] = "take"
    refit: str
    version: int
    """Lowest version that the new policy may get, so that replicas that are refitted together get the same."""


class Calibrate(Message):
    """Set KV scales for the policy that is served, or say whether that is possible; see `Rank.calibrate`."""

    step: Literal["check_calibration", "calibrate"] = "calibrate"
    job: Job


Order: TypeAlias = Do | Prepare | RefitStep | Stream | Join | Take | Calibrate


class Request(Message):
    """One order to every rank."""

    id: str
    protocol: int = PROTOCOL
    order: Annotated[Order, Field(discriminator="step")]


class Reply(Message):
    """One rank's answer."""

    id: str
    protocol: int = PROTOCOL
    rank: int = 0
    num_ranks: int = 0
    place: Place | None = None
    """Where the rank runs, if it was asked who it is."""
    error: ErrorRecord | None = None
    version: int = 0
    is_dirty: bool = False
    package_version: str = ""
    reports: tuple[RankReport, ...] = ()
    layout: EngineLayout | None = None
    fingerprint: str = ""
    kv: KvReport | None = None
    free_bytes: int = 0
    """Memory for buckets on the rank's GPU, once it has joined a broadcast group; 0 on a CPU."""

    def is_to(self, request: Request) -> bool:
        """Whether this is the reply to `request`. The reply to an unreadable request has no id."""
        return self.id in (request.id, "")


class _Kind(BaseModel):
    kind: str


class _Outcome(BaseModel):
    id: str = ""
    error: _Kind | None = None
    version: int = 0
    is_dirty: bool = False
    reports: tuple[object, ...] = ()


def failure_of(answer: str) -> str | None:
    """The kind of a rank's error; None if it succeeded, or if nobody knows what it says."""
    try:
        error = _Outcome.model_validate_json(answer).error
    except ValidationError:
        return None
    return None if error is None else error.kind


def common_version(answers: Sequence[str], *, if_written_by: str | None = None) -> int | None:
    """The version that every rank holds whole; None if they differ, or if one is dirty or failed.

    Args:
        answers: The ranks' answers, unchecked.
        if_written_by: A request. Return None, too, if one of them does not answer that it has written by it.

    Raises:
        ValidationError: Nobody knows what a rank says.
    """
    outcomes = [_Outcome.model_validate_json(answer) for answer in answers]
    versions = {outcome.version for outcome in outcomes}
    is_whole = len(versions) == 1 and not any(outcome.is_dirty or outcome.error for outcome in outcomes)
    if if_written_by is not None:
        asked = _Outcome.model_validate_json(if_written_by).id
        is_whole &= all(outcome.id == asked and outcome.reports for outcome in outcomes)
    return versions.pop() if is_whole else None


def have_done(answers: Sequence[Any], request: str) -> list[Reply]:
    """The ranks' replies if all of them succeeded, otherwise an empty list; the driver then raises the reasons.

    Args:
        answers: The ranks' answers, unchecked.
        request: The request as it was sent.
    """
    try:
        asked = Request.model_validate_json(request)
        replies = [Reply.model_validate_json(answer) for answer in answers]
    except ValidationError:
        return []
    is_done = all(reply.is_to(asked) and reply.error is None and reply.protocol == PROTOCOL for reply in replies)
    return replies if is_done else []
