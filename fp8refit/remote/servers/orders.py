"""The messages between a refit's driver and a server, over the server's own HTTP.

Orders mirror `Engine`. An order begins with one line of validated JSON, its head. The texts after it are passed on unread:
messages to the ranks (`messages`), and prompts. So the server parses little, however long an order is. An answer is JSON.
"""

import os
import uuid
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from fp8refit import __version__
from fp8refit.config import RefitConfig, Wait
from fp8refit.errors import RankFailedError, UnsupportedEngineError
from fp8refit.remote.protocol.channel import EngineTime
from fp8refit.remote.protocol.messages import Message, Place, first_problem
from fp8refit.transport.vote import ErrorRecord

PROTOCOL: Final = 7
"""Version of these messages; both sides must use the same."""
MAX_BYTES = 1 << 28
"""Maximum size of an answer."""
MAX_ORDER_BYTES = 1 << 26
"""Maximum size of an order. Tensors are never sent this way: the longest orders are offers of broadcasts, about 300 bytes a
tensor."""
MAX_HEAD = 1 << 18
"""Maximum number of characters in the head of an order."""
MAX_REASON = 1 << 13
"""Maximum number of characters in a reason to refuse requests, which every refused request gets."""
MEDIA_TYPE = "application/x-fp8refit"
"""Media type of an order. Browsers do not let a page send it to another site without that site's consent."""
PROTOCOL_HEADER = "X-Fp8refit-Protocol"
TOKEN_HEADER = "X-Fp8refit-Token"
TOKEN_VARIABLE = "FP8REFIT_TOKEN"
"""Environment variable with the secret that drivers must present, for servers without an API key."""
MIN_TOKEN = 16
"""Minimum number of characters in a token."""
API_KEY_VARIABLE = "FP8REFIT_API_KEY"
"""Environment variable with the API key that drivers present."""


def read_token(given: str | None = None) -> str | None:
    """The given token, or the one in the environment; None if empty or unset.

    Raises:
        UnsupportedEngineError: It is too short, or cannot be sent in an HTTP header.
    """
    token = os.environ.get(TOKEN_VARIABLE) if given is None else given
    if not token:
        return None
    if len(token) < MIN_TOKEN or not is_header(token):
        raise UnsupportedEngineError(
            f"{TOKEN_VARIABLE} has {len(token)} characters; a token has {MIN_TOKEN} or more, printable ASCII without spaces: "
            "set the same random one for server and driver, for example from `openssl rand -hex 32`"
        )
    return token


def is_header(secret: str) -> bool:
    """Whether a secret can be sent in a header as it is."""
    return secret.isascii() and secret.isprintable() and " " not in secret


class _Texts:
    """Reads the texts that follow the head of an order, one after another."""

    def __init__(self, message: str, start: int) -> None:
        self._message, self._next = message, start

    def take(self, length: Any) -> str:
        if type(length) is not int or not 0 <= length <= len(self._message) - self._next:
            raise ValueError("is not the length of a text that follows")
        start, self._next = self._next, self._next + length
        return self._message[start : self._next]

    def check_is_done(self) -> None:
        if self._next != len(self._message):
            raise ValueError(f"{len(self._message) - self._next} unexpected trailing characters")


def _fetch(value: Any, info: ValidationInfo) -> Any:
    return value if info.context is None else info.context["texts"].take(value)


def _put_aside(text: str, info: SerializationInfo) -> str | int:
    if info.context is None:
        return text
    info.context["texts"].append(text)
    return len(text)


Text: TypeAlias = Annotated[str, BeforeValidator(_fetch), PlainSerializer(_put_aside)]
"""A text that follows the head of an order; the head has its length in characters."""


class Hello(Message):
    """Ask who answers."""

    step: Literal["hello"] = "hello"


class OfPause(Message):
    """Begins or ends a pause."""

    step: str
    number: int = Field(default=0, ge=0, lt=1 << 63)
    """Which of the driver's pauses."""


class Pause(OfPause):
    """Pause requests."""

    step: Literal["pause"] = "pause"
    config: RefitConfig


class Resume(OfPause):
    """Resume requests, and publish the version of the policy that answers them."""

    step: Literal["resume"] = "resume"
    version: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Version of the policy that is served from now on; None if it is the old one."""


class Refuse(OfPause):
    """Refuse requests until the next good refit."""

    step: Literal["refuse"] = "refuse"
    reason: str = Field(max_length=MAX_REASON)


class Flush(Message):
    """Drop the caches of the old policy."""

    step: Literal["flush"] = "flush"


class Tokenize(Message):
    """Tokenize prompts."""

    step: Literal["tokenize"] = "tokenize"
    prompts: tuple[Text, ...]


class Send(Message):
    """Send one message to every rank, or two in one exchange; see `fp8refit.remote.protocol.channel.Channel.send`. If all ranks
    have then committed a policy, the server resumes requests at once.
    """

    step: Literal["send"] = "send"
    messages: tuple[Text, ...] = Field(min_length=1, max_length=2)
    timeouts_s: tuple[Wait, ...]
    """Time limit of each message."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.timeouts_s) != len(self.messages):
            raise ValueError("has another number of time limits than of messages")
        return self


class Look(Message):
    """Ask whether the server's process can read a path."""

    step: Literal["look"] = "look"
    path: str


AnyOrder: TypeAlias = Annotated[
    Hello | Pause | Resume | Refuse | Flush | Tokenize | Send | Look, Field(discriminator="step")
]


class Caller(Message):
    """A driver."""

    place: Place
    pid: int = Field(ge=0, lt=1 << 31)
    name: str
    """Distinguishes drivers of one process."""

    @classmethod
    def new(cls) -> "Caller":
        """Describe a driver in this process."""
        return cls(place=Place.here(), pid=os.getpid(), name=uuid.uuid4().hex)


class OrderRequest(Message):
    """One order of one driver."""

    protocol: Literal[7] = PROTOCOL
    driver: Caller
    order: AnyOrder

    def encode(self) -> str:
        """Encode for sending: the head, a line feed, and the texts."""
        texts: list[str] = []
        head = self.model_dump_json(by_alias=True, context={"texts": texts})
        return "".join([head, "\n", *texts])

    @classmethod
    def decode(cls, message: str) -> "OrderRequest":
        """Decode a received order.

        Raises:
            RankFailedError: This version cannot read it.
        """
        end = message.find("\n", 0, MAX_HEAD + 1)
        texts = _Texts(message, end + 1)
        try:
            if end < 0:
                raise ValueError(f"its first {MAX_HEAD} characters hold no line of JSON")
            request = cls.model_validate_json(message[:end], context={"texts": texts})
            texts.check_is_done()
        except ValueError as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
            raise RankFailedError(
                f"this server, fp8refit {__version__}, cannot read what the driver says; install the same version on both "
                f"sides ({problem})"
            ) from error
        return request


class Answer(Message):
    """A server's answer to an order."""

    speaker: Literal["fp8refit"] = "fp8refit"
    server: str = ""
    """A new one every time the server starts."""
    place: Place | None = None
    value: int = 0
    said: tuple[str, ...] = ()
    """The ranks' answers, in rank order."""
    is_refused: bool = False
    """See `fp8refit.remote.protocol.channel.Answers`."""
    times_s: dict[EngineTime, float] = Field(default_factory=dict)
    """See `fp8refit.remote.protocol.channel.Answers`."""
    is_resumed: bool = False
    """Whether requests run again, under the policy that the ranks have committed."""
    token_ids: list[list[int]] = Field(default_factory=list)
    error: ErrorRecord | None = None
