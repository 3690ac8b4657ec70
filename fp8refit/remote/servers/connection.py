"""The driver's end of a line to the process that has an engine, whatever carries what is said on it."""

from typing import ClassVar

from pydantic import ValidationError

from fp8refit.errors import UnsupportedEngineError
from fp8refit.remote.servers.orders import Answer, AnyOrder, Caller, Hello, Look, OrderRequest, Place

ASKING_S = 60.0
"""How long a server may take for what it does not have to work for."""


class Connection:
    """Orders go one way, answers come back. A subclass says how.

    Args:
        label: What is at the other end, for messages.
    """

    asking_s: ClassVar[float] = ASKING_S
    """How long the other end may take for what it does not have to work for."""
    is_shared: ClassVar[bool] = True
    """Whether several threads may give orders at once."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.place: Place | None = None
        """Where the other end runs, once it was asked."""
        self._caller = Caller.new()

    @property
    def is_here(self) -> bool:
        """Whether the other end runs where this process runs, so that they can share memory."""
        return self.place == Place.here()

    def deliver(self, message: str, *, timeout_s: float) -> str:
        """Hand an order to the order handler at the other end, and what it says.

        Raises:
            EngineLostError: The other end cannot be reached, or does not answer in time.
            UnsupportedEngineError: There is no order handler.
        """
        raise NotImplementedError

    def post(self, order: AnyOrder, *, timeout_s: float) -> Answer:
        """Have an order carried out.

        Raises:
            EngineLostError: The other end cannot be reached, or does not answer in time.
            UnsupportedEngineError: It has no order handler, or does not take orders from here.
            RefitError: What came of it.
        """
        request = OrderRequest(driver=self._caller, order=order)
        said = self.deliver(request.encode(), timeout_s=timeout_s)
        try:
            answer = Answer.model_validate_json(said)
        except ValidationError as error:
            raise UnsupportedEngineError(
                f"{self.label} answered what this version of fp8refit cannot read; install the same version on both sides "
                f"({said[:200]!r})"
            ) from error
        self.place = answer.place
        if answer.error is not None:
            raise answer.error.error()
        return answer

    def greet(self) -> str:
        """Who is there: another name after every start."""
        return self.post(Hello(), timeout_s=self.asking_s).server

    def sees(self, path: str) -> bool:
        """Whether the other end can read a path; its ranks can then, too."""
        if not path.isascii() and path.encode(errors="ignore").decode() != path:
            return False  # bytes that are no text: they cannot be asked for
        return bool(self.post(Look(path=path), timeout_s=self.asking_s).value)
