"""Clients that ask a server without end, and note what they hear, and when."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from tests.oracle.judge import Answer

CUT_S = 0.02
"""Before the next request, after one that was refused."""


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
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._go_on, args=(place,)) for place in range(num_clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

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

    def _go_on(self, place: int) -> None:
        while not self._is_over.is_set():
            if self.ask(place).status != 200:
                time.sleep(CUT_S)
            place += 1
