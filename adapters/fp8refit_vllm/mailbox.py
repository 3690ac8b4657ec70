"""Where the ranks of an engine leave their answers for a trainer: a store that the trainer opens.

vLLM's `update_weights` takes a message to every rank and brings nothing back. Answers are text; nothing is pickled.
"""

from pydantic import BaseModel, ConfigDict, Field
from torch.distributed import Store

from fp8refit.errors import TransportError
from fp8refit.transport.collective.store import find_store, open_store

_PART_BYTES = 4 << 20
"""The store takes no value of more than 8 MiB; a large engine's layout is more."""
_MAX_PARTS = 64
_ENDED, _DROPPED = "ended", "dropped"


class Address(BaseModel):
    """Where one mailbox is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str = Field(min_length=16, max_length=64)
    """Names it; without it nobody writes there by chance."""
    host: str = Field(max_length=255)
    port: int = Field(ge=1, le=65535)


class Mailbox:
    """One end of a mailbox. `open` it where the trainer is, and let every rank `find` its `address`."""

    def __init__(self, address: Address, store: Store) -> None:
        self.address = address
        self.is_lost = False
        """Whether the store is gone, or was silent for too long: its late answer would be taken for that of another."""
        self._store = store

    @classmethod
    def open(cls, *, host: str, port: int, timeout_s: float) -> "Mailbox":
        """Open a store.

        Args:
            host: Address of this host that the ranks reach, and that the store binds to.
            port: 0 for any that is free.
            timeout_s: For every exchange with it.

        Raises:
            TransportError: The address is none of this host's, or taken.
        """
        store, token, port = open_store(host=host, port=port, timeout_s=timeout_s)
        return cls(Address(token=token, host=host, port=port), store)

    @classmethod
    def find(cls, address: Address, *, timeout_s: float) -> "Mailbox":
        """Go to a store that was opened elsewhere.

        Raises:
            TransportError: It cannot be reached.
        """
        found = find_store(host=address.host, port=address.port, token=address.token, timeout_s=timeout_s)
        return cls(address, found)

    def leave(self, letter: str, rank: int, text: str) -> None:
        """Leave the answer of a rank to a letter.

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
        """Take the answer of a rank to a letter; None if it left none.

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
        """Count up, and say how many there are.

        Raises:
            TransportError: The store is gone.
        """
        with _Reaching(self):
            total: int = self._store.add(f"count/{name}", more)
            return total

    def end(self, why: str) -> None:
        """Let the trainer know that its letters are no longer read.

        Raises:
            TransportError: It is gone.
        """
        with _Reaching(self):
            self._set(_ENDED, why)

    def why_ended(self) -> str | None:
        """What a rank said that reads no more letters, if one did.

        Raises:
            TransportError: The store is gone.
        """
        with _Reaching(self):
            return self._store.get(_ENDED).decode() if self._store.check([_ENDED]) else None

    def drop(self) -> None:
        """Let the ranks know that the trainer sends no more letters.

        Raises:
            TransportError: The store is gone.
        """
        with _Reaching(self):
            self._set(_DROPPED, "")

    def is_dropped(self) -> bool:
        """Whether the trainer sends no more letters.

        Raises:
            TransportError: It is gone.
        """
        with _Reaching(self):
            dropped: bool = self._store.check([_DROPPED])
            return dropped

    def _set(self, key: str, value: str) -> None:
        """Write, and wait until it is there: the store's own `set` does not, and the trainer looks once."""
        self._store.set(key, value)
        self._store.check([key])  # answered in turn


class _Reaching:
    """Makes what a store raises one of our errors, and the last thing that it says."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def __enter__(self) -> None:
        if self._mailbox.is_lost:
            raise TransportError("the trainer's mailbox could not be reached before; start the weight transfer anew")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            self._mailbox.is_lost = True
            raise TransportError(
                f"the trainer's mailbox cannot be reached ({error}); the trainer died, or does not answer"
            ) from error
