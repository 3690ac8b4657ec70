"""Clients that ask a server without end, and note what they hear, and when."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from fp8refit.bench.server import Clients
from tests.oracle.judge import Answer


class Heard(NamedTuple):
    """What a server said to one request."""

    status: int
    """0 if nobody answered."""
    tokens: Sequence[int] = ()
    version: str | None = None
    """Of the policy, if the server says it."""


Ask = Callable[[Sequence[int], int], Heard]
"""Has a server go on greedily from a prompt for a number of tokens."""


class Load:
    """Clients of one server.

    Args:
        ask: Asks it.
        prompts: Client after client begins with another of them, and takes the next one each time.
        num_clients: How many there are.
        num_tokens: That each answer has.
    """

    def __init__(self, ask: Ask, prompts: Sequence[Sequence[int]], *, num_clients: int, num_tokens: int) -> None:
        self.answers: list[Answer] = []
        self._asks, self._prompts, self._num_tokens = ask, prompts, num_tokens
        self._clients = Clients(lambda place: self.ask(place).status == 200, num_clients)

    def __enter__(self) -> Self:
        self._clients.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.__exit__()

    def ask(self, place: int) -> Answer:
        """One request more, from here."""
        sent_s = time.monotonic()
        heard = self._asks(self._prompts[place % len(self._prompts)], self._num_tokens)
        answer = Answer(
            sent_s=sent_s,
            heard_s=time.monotonic(),
            status=heard.status,
            tokens=heard.tokens,
            num_asked=self._num_tokens,
            version=heard.version,
        )
        self.answers.append(answer)
        return answer
