"""Carries messages to an engine's ranks through any client of vLLM's weight-transfer API, and collects their answers."""

import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from typing_extensions import override

from fp8refit.errors import EngineLostError, RankFailedError, RefitError, TransportError, UnsupportedEngineError
from fp8refit.remote.channel import Channel
from fp8refit_vllm.compat import takes_version
from fp8refit_vllm.core_compat import call_in_time
from fp8refit_vllm.letters import Invitation, Letter, Presence
from fp8refit_vllm.mailbox import Mailbox
from fp8refit_vllm.transfer_rank import FINDING_S, PRESENCE

T = TypeVar("T")

_NOT_CONFIGURED = (
    "boot the engine with weight_transfer_config={'backend': 'fp8refit'} where fp8refit is installed, and a server also "
    "with VLLM_SERVER_DEV_MODE=1; its log says more"
)


class Client(Protocol):
    """vLLM's `VLLMWeightSyncClient`."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Pass the trainer's first message to every rank."""
        ...

    def start_weight_update(self) -> None:
        """Begin an update."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Pass a message of the update to every rank."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update. `weight_version` exists since vLLM 0.32."""
        ...


class ClientChannel(Channel):
    """Implements `fp8refit.remote.channel.Channel` over a vLLM client, one call at a time.

    Args:
        client: Reaches the engine.
        mailbox: Receives the ranks' answers.
    """

    def __init__(self, client: Client, mailbox: Mailbox) -> None:
        self._client = client
        self._mailbox: Mailbox | None = mailbox
        self._num_ranks = 0
        self._turn = threading.Lock()

    def invite(self, timeout_s: float) -> list[Presence]:
        """Connect every rank of the engine to this trainer.

        Raises:
            UnsupportedEngineError: The engine was not booted with this weight transfer, or the client does not reach
                exactly one whole engine.
            TransportError: The ranks cannot reach the mailbox.
            EngineLostError: The engine does not answer.
            RankFailedError: A rank sent an answer that cannot be read.
        """
        mailbox = self._require_mailbox()
        invitation = Invitation(address=mailbox.address).encode()
        try:
            self._ask(lambda: self._client.init_weight_transfer_engine(invitation), timeout_s + FINDING_S)
        except EngineLostError:
            raise
        except RankFailedError as error:
            raise UnsupportedEngineError(
                f"this engine does not accept weights from fp8refit ({error}); {_NOT_CONFIGURED}"
            ) from error
        said = mailbox.collect(PRESENCE, 0)
        if said is None:
            raise TransportError(
                f"no rank of the engine connected to {mailbox.address.host}:{mailbox.address.port}; set "
                "RefitConfig.collective.host to an address of this trainer's host that the engine's hosts can reach"
            )
        present = [_read_presence(said)]
        self._num_ranks = present[0].num_ranks
        others = [mailbox.collect(PRESENCE, rank) for rank in range(1, self._num_ranks)]
        present += [_read_presence(said) for said in others if said is not None]
        if mailbox.count("0") > 1:
            raise UnsupportedEngineError(
                "this client reaches several engines; create one client and one trainer for each"
            )
        if len(present) < self._num_ranks:
            raise UnsupportedEngineError(
                f"{len(present)} of {self._num_ranks} ranks of the engine connected; the client must reach all of "
                f"them, and they must reach {mailbox.address.host}:{mailbox.address.port}"
            )
        return present

    def start(self, timeout_s: float) -> None:
        """Begin an update.

        Raises:
            EngineLostError: The engine does not answer.
            RankFailedError: vLLM raised an error.
        """
        self._check_is_ours()
        self._ask(self._client.start_weight_update, timeout_s)

    def finish(self, version: int | None, timeout_s: float) -> None:
        """End an update.

        Args:
            version: The new policy version, for vLLM to publish in its outputs; None if nothing was written.
            timeout_s: Seconds to wait.

        Raises:
            EngineLostError: The engine does not answer.
            RankFailedError: vLLM raised an error.
        """
        if version is not None and takes_version(self._client):
            self._ask(lambda: self._client.finish_weight_update(weight_version=str(version)), timeout_s)
        else:
            self._ask(self._client.finish_weight_update, timeout_s)

    @override
    async def call(self, message: str, *, timeout_s: float) -> Sequence[str]:
        mailbox = self._require_mailbox()
        letter = Letter(token=mailbox.address.token, id=uuid.uuid4().hex, message=message)
        try:
            self._ask(lambda: self._client.update_weights(letter.encode()), timeout_s)
        except RankFailedError as error:
            self._check_is_ours()
            raise EngineLostError(
                f"a call to the engine's ranks failed ({error}); its log says why. Create a new trainer; if that fails "
                "too, restart the engine"
            ) from error
        answers = [mailbox.collect(letter.id, rank) for rank in range(self._num_ranks)]
        absent = [rank for rank, answer in enumerate(answers) if answer is None]
        if absent:
            self._check_is_ours()
            ranks = ", ".join(map(str, absent))
            raise EngineLostError(f"rank(s) {ranks} did not answer; their log says why. Create a new trainer")
        return [answer for answer in answers if answer is not None]

    @override
    async def begin(self, message: str, *, timeout_s: float) -> None:
        """Not possible: every call of a vLLM client waits until the engine is done."""

    def close(self) -> None:
        """Release the engine for another trainer, even in the middle of an update."""
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            mailbox.drop()

    def _require_mailbox(self) -> Mailbox:
        if self._mailbox is None:
            raise EngineLostError("this trainer was shut down or has lost its engine; create a new one")
        return self._mailbox

    def _check_is_ours(self) -> None:
        """Check that the ranks still serve this trainer.

        Raises:
            EngineLostError: They do not.
        """
        why = self._require_mailbox().why_ended()
        if why is not None:
            raise EngineLostError(f"the engine no longer answers this trainer: {why}. Create a new trainer")

    def _ask(self, call: Callable[[], T], timeout_s: float) -> T:
        """Call the client in a separate thread, once its previous call has returned, and wait.

        Raises:
            EngineLostError: It took too long, or the engine is gone.
            RankFailedError: The client raised another error.
        """

        def call_in_turn() -> T:
            with self._turn:
                return call()

        try:
            return call_in_time(call_in_turn, timeout_s)
        except Exception as error:  # clients raise the errors of their transport
            if isinstance(error, RefitError):
                raise RankFailedError(str(error)) from error
            if isinstance(error, OSError) and getattr(error, "response", None) is None:
                raise EngineLostError(
                    f"the engine did not answer within {timeout_s:g} s or is gone ({type(error).__name__}: {error}); "
                    "restart it. If it is only slow, raise timeout_s and the client's own time limit"
                ) from error
            raise RankFailedError(f"vLLM raised {type(error).__name__}: {error}") from error


def _read_presence(said: str) -> Presence:
    try:
        return Presence.model_validate_json(said)
    except ValidationError as error:
        raise RankFailedError(
            f"cannot read a rank's answer ({error}); install the same version of fp8refit on both sides"
        ) from error
