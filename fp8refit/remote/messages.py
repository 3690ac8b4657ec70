"""What a driver and the ranks of its engine say to each other: validated JSON, no pickle, no tensors.

Every request has an id that its reply echoes, and every step after `Prepare` names the refit it belongs to. Errors are values.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fp8refit.config import KvOrder, RefitConfig, Wait
from fp8refit.live.layout import EngineLayout
from fp8refit.report import KvReport, RankReport
from fp8refit.sources.files import FileStamp
from fp8refit.transport.collective.buckets import MAX_SECTIONS, WireTensor
from fp8refit.transport.collective.communicator import Meeting
from fp8refit.transport.memory.shared_tensors import Segment, TensorRef
from fp8refit.transport.vote import ErrorRecord

PROTOCOL = 10
"""Number of this language; both sides have to speak the same."""
_MAX_PROBLEMS = 100
"""Beyond this many they are counted alone: pydantic's list of them takes a hundred times what was sent."""


def first_problem(error: ValidationError) -> str:
    """What is wrong with what was sent, briefly, however much there is."""
    count = error.error_count()
    if count > _MAX_PROBLEMS:
        return f"{count} problems"
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'][:8]))}: {first['msg']}"[:500] + f" (1 of {count} problems)" * (count > 1)


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def encode(self) -> str:
        """As JSON."""
        return self.model_dump_json(by_alias=True)


class MappedTensors(_Message):
    """A source whose tensors lie in memory that the ranks can map."""

    kind: Literal["mapped"] = "mapped"
    digest: str
    segments: tuple[Segment, ...] = ()
    refs: tuple[TensorRef, ...] | None = None
    """None if these are the tensors of the last refit, by their digest."""
    problems: tuple[str, ...] = ()


class Files(_Message):
    """A safetensors file or folder that every rank reads for itself."""

    kind: Literal["files"] = "files"
    path: str
    stamps: tuple[FileStamp, ...]
    """Of the files that the driver judged, in their order; no others are read."""


class Pushed(_Message):
    """A source that the driver reads, and hands over part by part."""

    kind: Literal["pushed"] = "pushed"
    manifest: dict[str, tuple[tuple[int, ...], str]] | None
    """Shape and dtype of everything that will come, if that is known."""
    problems: tuple[str, ...] = ()
    odd_scales: tuple[str, ...] = ()
    unfit: dict[str, str] = {}
    """KV scales that are none, and why."""


class Broadcast(_Message):
    """A source that the trainer broadcasts, in buckets that both sides derive from what is announced here."""

    kind: Literal["broadcast"] = "broadcast"
    token: str
    """Of the group that it is broadcast in."""
    digest: str
    """sha256 over the rest."""
    tensors: tuple[WireTensor, ...] | None
    """None if this is the offer of the last refit, by its digest."""
    sections: tuple[Annotated[int, Field(ge=0, lt=MAX_SECTIONS)], ...] = Field(default=(), max_length=1 << 16)
    """In which section each rank of the group is, the trainer apart; empty if all get the same."""
    bucket_bytes: int = 0
    num_buckets: int = 0
    problems: tuple[str, ...] = ()
    odd_scales: tuple[str, ...] = ()
    unfit: dict[str, str] = {}
    """KV scales that are none, and why."""

    @property
    def num_sections(self) -> int:
        """Between how many tensors are cut."""
        return max(self.sections, default=-1) + 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        for tensor in self.tensors or ():
            if tensor.cut is not None and len(tensor.cut.spans) != self.num_sections:
                raise ValueError(
                    f"{tensor.name}: is cut for {len(tensor.cut.spans)} sections, there are {self.num_sections}"
                )
        return self


class Hello(_Message):
    """Who is there?"""

    step: Literal["hello"] = "hello"


class Prepare(_Message):
    """Judge a source; see `Rank.prepare`."""

    step: Literal["prepare"] = "prepare"
    refit: str
    """Names this refit from here on; an unfinished one is given up."""
    config: RefitConfig
    source: Annotated[MappedTensors | Files | Pushed | Broadcast, Field(discriminator="kind")]
    kv: KvOrder | None = None
    compares: bool = False
    """Whether nothing is written, and what is held is compared with what would be."""
    is_under_way: bool = False
    """Whether the trainer broadcasts already, and `Take` comes next: the first buckets may be received meanwhile."""

    @property
    def is_known(self) -> bool:
        """Whether the source is said to be laid out as that of the last refit."""
        source = self.source
        return (source.kind == "mapped" and source.refs is None) or (
            source.kind == "broadcast" and source.tensors is None
        )


class Write(_Message):
    """Write all of it; see `Rank.write`."""

    step: Literal["write"] = "write"
    refit: str
    keeps_mapped: bool
    """Whether the source's memory stays mapped for the next refit; what is mapped cannot be given back to its GPU."""


class Begin(_Message):
    """Be ready for parts; see `Target.begin`."""

    step: Literal["begin"] = "begin"
    refit: str


class Run(_Message):
    """Where the rows begin of a part of a tensor."""

    first_row: int = Field(ge=0)
    full_shape: tuple[int, ...] = Field(min_length=1)
    """Of the whole tensor."""


class Packed(_Message):
    """What one set of buckets holds. It is no order: it comes through the ring of a `Stream`."""

    segments: tuple[Segment, ...]
    """All that the trainer uses; the ranks let go of others."""
    refs: tuple[TensorRef, ...]
    runs: dict[str, Run] = {}
    """Which of them are not the whole tensor of their name, but rows of it. The runs of one tensor come in order."""


class Stream(_Message):
    """Write what a ring tells of, for as long as something comes; see `fp8refit.remote.handing`."""

    step: Literal["stream"] = "stream"
    refit: str
    ring: Segment


class Finish(_Message):
    """All parts were sent; see `Rank.finish`."""

    step: Literal["finish"] = "finish"
    refit: str


class Join(_Message):
    """Join the group that a trainer broadcasts in, and leave the last one; see `Communicator.join`."""

    step: Literal["join"] = "join"
    meeting: Meeting
    first_rank: int
    """Rank in the group of this engine's rank 0."""
    timeout_s: Wait


class Take(_Message):
    """Receive and write all buckets of a broadcast, and commit; see `Receiver.take`."""

    step: Literal["take"] = "take"
    refit: str
    version: int
    """Least number that the new policy may have: replicas that are refitted together have the same."""


class CheckCalibration(_Message):
    """Say whether KV scales can be set; see `Rank.check_calibration`."""

    step: Literal["check_calibration"] = "check_calibration"
    config: RefitConfig
    kv: KvOrder


class Calibrate(_Message):
    """Set KV scales for the policy that is served; see `Rank.calibrate`."""

    step: Literal["calibrate"] = "calibrate"
    config: RefitConfig
    kv: KvOrder


class Abandon(_Message):
    """Let go of what was prepared; see `Target.abandon`."""

    step: Literal["abandon"] = "abandon"
    refit: str


class Describe(_Message):
    """Say what is held; see `LiveModel.layout`."""

    step: Literal["describe"] = "describe"


class Fingerprint(_Message):
    """Say what the weights are; see `LiveModel.fingerprint`."""

    step: Literal["fingerprint"] = "fingerprint"


class Close(_Message):
    """Drop what is held beyond the engine, mappings among it."""

    step: Literal["close"] = "close"


Order: TypeAlias = (
    Hello
    | Prepare
    | Write
    | Begin
    | Stream
    | Finish
    | Join
    | Take
    | CheckCalibration
    | Calibrate
    | Abandon
    | Describe
    | Fingerprint
    | Close
)


class Request(_Message):
    """One order to every rank."""

    id: str
    protocol: int = PROTOCOL
    order: Annotated[Order, Field(discriminator="step")]


class Reply(_Message):
    """What one rank answers."""

    id: str
    protocol: int = PROTOCOL
    rank: int = 0
    error: ErrorRecord | None = None
    version: int = 0
    is_dirty: bool = False
    package_version: str = ""
    reports: tuple[RankReport, ...] = ()
    layout: EngineLayout | None = None
    fingerprint: str = ""
    kv: KvReport | None = None

    def is_to(self, request: Request) -> bool:
        """Whether this answers a request, and no earlier one. What a rank could not read had no id for it."""
        return self.id in (request.id, "")


def have_done(answers: Sequence[Any], request: str) -> list[Reply]:
    """What the ranks say, if every one of them did what was asked for; nothing if not, and then the driver says why.

    Args:
        answers: Whatever came.
        request: As it was given to them.
    """
    try:
        asked = Request.model_validate_json(request)
        replies = [Reply.model_validate_json(answer) for answer in answers]
    except ValidationError:
        return []
    is_done = all(reply.is_to(asked) and reply.error is None and reply.protocol == PROTOCOL for reply in replies)
    return replies if is_done else []
