"""What the driver of a refit and the process of a server say to each other: validated JSON over the server's own HTTP.

Orders mirror `fp8refit.engine.Engine`. What they say to the ranks behind that process (`messages`) goes through as text.
"""

import os
import uuid
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from fp8refit.config import RefitConfig
from fp8refit.vote import ErrorRecord

MAX_BYTES = 1 << 28
"""Of one order, and of one answer. Tensors never go this way."""
TOKEN_VARIABLE = "FP8REFIT_TOKEN"
"""Environment variable with the secret that drivers have to know, for servers that have no API key."""
API_KEY_VARIABLE = "FP8REFIT_API_KEY"
"""Environment variable with the API key that drivers show."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Hello(_Message):
    """Who is there?"""

    step: Literal["hello"] = "hello"


class Pause(_Message):
    """See `fp8refit.engine.Engine.pause`."""

    step: Literal["pause"] = "pause"
    config: RefitConfig


class Resume(_Message):
    """See `fp8refit.engine.Engine.resume`, and `publish_version`."""

    step: Literal["resume"] = "resume"
    version: int | None = None
    """Of the policy that is served from then on, if it is a new one."""


class Refuse(_Message):
    """See `fp8refit.engine.Engine.refuse`."""

    step: Literal["refuse"] = "refuse"
    reason: str


class Flush(_Message):
    """See `fp8refit.engine.Engine.flush_caches`."""

    step: Literal["flush"] = "flush"


class Tokenize(_Message):
    """See `fp8refit.engine.Engine.tokenize`."""

    step: Literal["tokenize"] = "tokenize"
    prompts: tuple[str, ...]


class Call(_Message):
    """See `fp8refit.remote.Channel.call`."""

    step: Literal["call"] = "call"
    message: str
    timeout_s: float


class Pair(_Message):
    """See `fp8refit.transport.pairs.Pairs.call_pair`."""

    step: Literal["pair"] = "pair"
    first: str
    second: str
    timeouts_s: tuple[float, float]


class Look(_Message):
    """Can this path be read there?"""

    step: Literal["look"] = "look"
    path: str


AnyOrder: TypeAlias = Annotated[
    Hello | Pause | Resume | Refuse | Flush | Tokenize | Call | Pair | Look, Field(discriminator="step")
]


class Place(_Message):
    """Where a process runs. Only processes of one place can hand memory to each other and see each other die."""

    boot_id: str
    """Of the host's kernel."""
    pid_namespace: int

    @classmethod
    def here(cls) -> "Place":
        """Of this process."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(boot_id=boot_id, pid_namespace=Path("/proc/self/ns/pid").stat().st_ino)


class Caller(_Message):
    """A driver."""

    place: Place
    pid: int
    name: str
    """Tells drivers of one process apart."""

    @classmethod
    def new(cls) -> "Caller":
        """A driver in this process."""
        return cls(place=Place.here(), pid=os.getpid(), name=uuid.uuid4().hex)


class OrderRequest(_Message):
    """One order of one driver."""

    driver: Caller
    token: str = Field(default="", repr=False)
    order: AnyOrder

    def encode(self) -> str:
        """As JSON."""
        return self.model_dump_json(by_alias=True)


class Answer(_Message):
    """What the server's process says."""

    speaker: Literal["fp8refit"] = "fp8refit"
    server: str = ""
    """Another one every time that the server starts."""
    place: Place | None = None
    value: int = 0
    said: tuple[str, ...] = ()
    """What every rank said, in order of rank."""
    is_refused: bool = False
    """Whether that was to the first of two messages; see `fp8refit.transport.pairs.PairAnswers`."""
    flush_s: float = 0.0
    """See there."""
    token_ids: list[list[int]] = []
    error: ErrorRecord | None = None
