"""Messages between processes of several hosts: they are left in a store that one of them, the trainer, opens."""

import contextlib
from collections.abc import Iterator
from typing import Self

from pydantic import BaseModel, Field
from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError

from fp8refit.errors import RefitError, TransportError
from fp8refit.transport.collective.store import find_store

_PART_BYTES = 4 << 20
"""Longer messages are sent in parts: the store takes at most 8 MiB at once."""
_ABORTED, _END_OF_WORD = "aborted", "\0"


class Address(BaseModel, frozen=True, extra="forbid"):
    """Where the trainer's store is."""

    token: str = Field(min_length=16, max_length=64)
    """Identifies the group, so that nobody joins by accident."""
    host: str = Field(max_length=255)
    port: int = Field(ge=1, le=65535)


class Board:
    """One member's end of a store. Rank 0 is the trainer, which opened it.

    An end that failed is not used again: a late answer could be mistaken for the next one.
    """

    def __init__(self, address: Address, rank: int, store: Store) -> None:
        self.address = address
        self.rank = rank
        self._store = store
        self._is_ended = False
        self._why = "the group was left"

    @classmethod
    def find(cls, address: Address, rank: int, *, timeout_s: float) -> Self:
        """Connect to the trainer's store.

        Raises:
            TransportError: It cannot be reached.
        """
        store = find_store(host=address.host, port=address.port, token=address.token, timeout_s=timeout_s)
        return cls(address, rank, store)

    def send(self, key: str, said: str) -> None:
        """Leave a message, which holds no NUL, for the other members, after those that are there.

        Raises:
            TransportError: The trainer is gone.
        """
        content = (said + _END_OF_WORD).encode()
        with self._reaching():
            for start in range(0, len(content), _PART_BYTES):
                self._store.append(key, content[start : start + _PART_BYTES])  # type: ignore[attr-defined]
            self._has([key])  # the store does not confirm what is appended; this is answered after it

    def receive(self, key: str) -> list[str]:
        """Return the messages that members left.

        Raises:
            TransportError: The trainer is gone.
        """
        with self._reaching():
            return self._words(key)

    def take(self, key: str) -> list[str]:
        """Return the messages that members left, and remove them.

        Raises:
            TransportError: The trainer is gone.
        """
        with self._reaching():
            words = self._words(key)
            self._store.delete_key(key)
            return words

    def abort(self, why: str = "the group was left") -> None:
        """Leave the group and tell the other members. May be called repeatedly."""
        if not self._is_ended:
            self._is_ended, self._why = True, why
        with contextlib.suppress(RuntimeError):  # the store is gone with the trainer
            # Append, so that the first cause stays first. Do not wait for an answer: the trainer may be silent.
            self._store.append(_ABORTED, f"member {self.rank}: {self._why}{_END_OF_WORD}")  # type: ignore[attr-defined]

    def first_word(self) -> str:
        """Return the message of the first member that left the group; empty if none did.

        Raises:
            TransportError: The trainer is gone.
        """
        return next(iter(self.receive(_ABORTED)), "")

    def _words(self, key: str) -> list[str]:
        return self._store.get(key).decode().split(_END_OF_WORD)[:-1] if self._has([key]) else []

    def _has(self, keys: list[str]) -> bool:
        has: bool = self._store.check(keys)
        return has

    def _has_ended(self) -> TransportError:
        return TransportError(f"this group has ended ({self._why}); refit again")

    def _reaching(self) -> contextlib.AbstractContextManager[None]:
        if self._is_ended:
            raise self._has_ended()
        return self._failing()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """End the group on any error, and turn missed deadlines and errors of the store or gloo into `TransportError`."""
        try:
            yield
        except BaseException as error:
            said, why = "", str(error) if isinstance(error, RefitError) else f"{type(error).__name__}: {error}"
            if isinstance(error, DistNetworkError):
                said = why = f"the trainer's store is gone, or does not answer ({error})"  # so it is not asked again
            elif isinstance(error, RuntimeError):
                # A connection may break before the leaving member's message is read.
                with contextlib.suppress(RuntimeError):
                    said = next(iter(self._words(_ABORTED)), "")
            self.abort(why)
            if isinstance(error, TooLateError | RuntimeError):
                raise TransportError(
                    f"the group ended: {said or error}. A member died or does not answer; the next refit connects again"
                ) from error
            raise


class TooLateError(Exception):
    """A deadline passed."""
