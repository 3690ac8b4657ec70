"""The messages between a trainer and an engine's ranks over vLLM's weight-transfer API: validated JSON.

A `Letter` carries a request of `fp8refit.remote.messages` as text.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

from fp8refit import __version__
from fp8refit.remote.servers.orders import Place
from fp8refit.transport.vote import ErrorRecord
from fp8refit_vllm.mailbox import Address

BACKEND = "fp8refit"
"""Our backend name in `weight_transfer_config`."""
WORKER_TRANSFER = "fp8refit_vllm.transfer.RefitTransferEngine"
TRAINER_TRANSFER = "fp8refit_vllm.trainer.RefitTrainer"
PROTOCOL = 1
"""Version of these messages; both sides must use the same."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def encode(self) -> dict[str, Any]:
        """The dict that vLLM's methods take."""
        return self.model_dump(mode="json")


class Invitation(_Message):
    """`init_info`: where ranks send their answers."""

    address: Address
    protocol: int = PROTOCOL
    package_version: str = __version__


class Presence(_Message):
    """A rank's answer to an invitation."""

    rank: int
    num_ranks: int
    place: Place
    error: ErrorRecord | None = None
    """Why the rank cannot be refitted."""


class Letter(_Message):
    """`update_info`: one message to every rank. Ranks that do not know the token refuse it."""

    token: str
    id: str
    """The key of its answers."""
    message: str
