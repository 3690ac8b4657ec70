"""What a trainer and the ranks of an engine say to each other through vLLM's weight-transfer methods: validated JSON.

What is asked of the ranks (`fp8refit.remote.messages`) goes through as text.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

from fp8refit import __version__
from fp8refit.remote.servers.orders import Place
from fp8refit.transport.vote import ErrorRecord
from fp8refit_vllm.mailbox import Address

BACKEND = "fp8refit"
"""Name of our weight-transfer engines, as `weight_transfer_config` has it."""
WORKER_TRANSFER = "fp8refit_vllm.transfer.RefitTransferEngine"
TRAINER_TRANSFER = "fp8refit_vllm.trainer.RefitTrainer"
PROTOCOL = 1
"""Number of this language; both sides have to speak the same."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def encode(self) -> dict[str, Any]:
        """As vLLM takes it."""
        return self.model_dump(mode="json")


class Invitation(_Message):
    """`init_info`: whom to answer."""

    address: Address
    protocol: int = PROTOCOL
    package_version: str = __version__


class Presence(_Message):
    """What a rank says when it was invited."""

    rank: int
    num_ranks: int
    place: Place
    error: ErrorRecord | None = None
    """Why it cannot be refitted."""


class Letter(_Message):
    """`update_info`: one message to every rank, or to none that does not know the token."""

    token: str
    id: str
    """Under which it is answered."""
    message: str
