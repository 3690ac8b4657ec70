"""The driver's connection to the process with the engine, independent of the transport."""

from typing import ClassVar

from pydantic import ValidationError

from fp8refit.errors import UnsupportedEngineError
from fp8refit.remote.protocol.messages import Place
from fp8refit.remote.servers.orders import Answer, AnyOrder, Caller, Hello, Look, OrderRequest

ASKING_S = 60.0
"""Time limit in seconds for requests that need no work."""


class Connection:
    """Sends orders and returns answers; subclasses implement the transport.

    Args:
        label: Name of the other end, for messages.
    """

    asking_s: ClassVar[float] = ASKING_S
    """Time limit in seconds for requests that need no work."""
    is_shared: ClassVar[bool] = True
    """Whether several threads may send orders at the same time."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.place: Place | None = None
        """Where the other end runs, once known."""
        self._caller = Caller.new()
        self.num_pauses = 0
        """How many pauses this caller has asked for."""

    @property
    def is_here(self) -> bool:
        """Whether the other end runs on the same host, so that memory can be shared."""
        return self.place == Place.here()

    def deliver(self, message: str, *, timeout_s: float) -> str:
        """Hand an order to the order handler at the other end, and return its answer.

        Raises:
            EngineLostError: The other end cannot be reached, or does not answer in time.
            UnsupportedEngineError: There is no order handler.
        """
        raise NotImplementedError

    def post(self, order: AnyOrder, *, timeout_s: float) -> Answer:
        """Send an order, and return the answer.

        Raises:
            EngineLostError: The other end cannot be reached, or does not answer in time.
            UnsupportedEngineError: It has no order handler, or does not take orders from here.
            RefitError: The order failed.
        """
        request = OrderRequest(driver=self._caller, order=order)
        said = self.deliver(request.encode(), timeout_s=timeout_s)
        try:
            answer = Answer.model_validate_json(said)
        except ValidationError as error:
            raise UnsupportedEngineError(
                f"{self.label} sent an answer that this version of fp8refit cannot read; install the same version on "
                f"both sides ({said[:200]!r})"
            ) from error
        self.place = answer.place
        if answer.error is not None:
            raise answer.error.error()
        return answer

    def ping(self) -> str:
        """Identify the other end: a name that changes with every start."""
        return self.post(Hello(), timeout_s=self.asking_s).server

    def sees(self, path: str) -> bool:
        """Whether the other end, and so its ranks, can read a path."""
        if not path.isascii() and path.encode(errors="ignore").decode() != path:
            return False  # not text, so it cannot be sent
        return bool(self.post(Look(path=path), timeout_s=self.asking_s).value)
