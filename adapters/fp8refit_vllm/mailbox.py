"""A key-value store, opened by the trainer, in which an engine's ranks leave their answers.

It exists because vLLM's `update_weights` returns nothing. Answers are text; nothing is pickled.
"""

from pydantic import BaseModel, ConfigDict, Field
from torch.distributed import Store

from fp8refit.errors import TransportError
from fp8refit.transport.collective.store import find_store, open_store

_PART_BYTES = 4 << 20
"""Longer answers are split: the store takes at most 8 MiB per value, and a large engine's layout is larger."""
_MAX_PARTS = 64
_ENDED, _DROPPED = "ended", "dropped"


class Address(BaseModel):
    """The address of a mailbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str = Field(min_length=16, max_length=64)
    """Identifies the mailbox, so that nobody writes to it by accident."""
    host: str = Field(max_length=255)
    port: int = Field(ge=1, le=65535)


class Mailbox:
    """One end of a mailbox: the trainer calls `open`, and every rank calls `find` with its `address`."""

    def __init__(self, address: Address, store: Store) -> None:
        self.address = address
        self.is_lost = False
        """Whether the store failed or timed out. It is not used again: a late reply could be mistaken for the next
        one."""
        self._store = store

    @classmethod
    def open(cls, *, host: str, port: int, timeout_s: float) -> "Mailbox":
        """Open a store.

        Args:
            host: Address of this host that the ranks can reach; the store binds to it.
            port: Port to bind; 0 for any free one.
            timeout_s: Time limit of each operation.

        Raises:
            TransportError: `host` is not an address of this host, or the port is taken.
        """
        store, token, port = open_store(host=host, port=port, timeout_s=timeout_s)
        return cls(Address(token=token, host=host, port=port), store)

    @classmethod
    def find(cls, address: Address, *, timeout_s: float) -> "Mailbox":
        """Connect to a store that was opened elsewhere.

        Raises:
            TransportError: The store cannot be reached.
        """
        found = find_store(host=address.host, port=address.port, token=address.token, timeout_s=timeout_s)
        return cls(address, found)

    def leave(self, letter: str, rank: int, text: str) -> None:
        """Store a rank's answer to a letter.

        Raises:
            TransportError: The trainer is gone.
        """
        content = text.encode()
        parts = [content[start : start + _PART_BYTES] for start in range(0, len(content), _PART_BYTES)]
        with _Reaching(self):
            for place, part in enumerate(parts):
                self._store.set(f"{letter}/{rank}/{place}", part)
            self._set(f"{letter}/{rank}", str(len(parts)))

    def collect(self, letter: str, rank: int) -> str | None:
        """Take a rank's answer to a letter; None if there is none.

        Raises:
            TransportError: The store is gone.
        """
        key = f"{letter}/{rank}"
        with _Reaching(self):
            if not self._store.check([key]):
                return None
            num_parts = self._store.get(key)
            if len(num_parts) > 2 or not num_parts.isdigit() or int(num_parts) > _MAX_PARTS:
                raise TransportError(f"rank {rank} left {num_parts[:9]!r} parts of an answer, which is not one of ours")
            keys = [f"{key}/{place}" for place in range(int(num_parts))]
            content = b"".join(self._store.get(part) for part in keys)
            for part in (key, *keys):
                self._store.delete_key(part)
            return content.decode()

    def count(self, name: str, *, more: int = 0) -> int:
        """Add `more` to a counter, and return its value.

        Raises:
            TransportError: The store is gone.
        """
        with _Reaching(self):
            total: int = self._store.add(f"count/{name}", more)
            return total

    def end(self, why: str) -> None:
        """Tell the trainer that its letters are no longer read.

        Raises:
            TransportError: The trainer is gone.
        """
        with _Reaching(self):
            self._set(_ENDED, why)

    def why_ended(self) -> str | None:
        """The reason given to `end`, or None if no rank has called it.

        Raises:
            TransportError: The store is gone.
        """
        with _Reaching(self):
            return self._store.get(_ENDED).decode() if self._store.check([_ENDED]) else None

    def drop(self) -> None:
        """Tell the ranks that the trainer sends no more letters.

        Raises:
            TransportError: The store is gone.
        """
        with _Reaching(self):
            self._set(_DROPPED, "")

    def is_dropped(self) -> bool:
        """Whether the trainer has called `drop`.

        Raises:
            TransportError: The trainer is gone.
        """
        with _Reaching(self):
            dropped: bool = self._store.check([_DROPPED])
            return dropped

    def _set(self, key: str, value: str) -> None:
        """Write, and wait until the value is stored: the store's `set` does not wait, and the trainer looks only
        once.
        """
        self._store.set(key, value)
        self._store.check([key])  # the store answers in order


class _Reaching:
    """Turns an error of the store into a `TransportError`, and marks the mailbox as lost."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def __enter__(self) -> None:
        if self._mailbox.is_lost:
            raise TransportError("the trainer's mailbox became unreachable earlier; start a new weight transfer")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            self._mailbox.is_lost = True
            raise TransportError(
                f"the trainer's mailbox cannot be reached ({error}); the trainer died or does not answer"
            ) from error
