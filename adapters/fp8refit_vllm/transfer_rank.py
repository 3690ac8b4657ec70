"""What one worker does when vLLM's weight-transfer methods are called for fp8refit.

Answers go to the trainer's mailbox: vLLM brings none back. What has no mailbox to go to, and is the same on every rank of the
engine, the last rank raises and no other: vLLM reads the ranks' answers in order up to the first that raised, and every later
call would be given the answers that it left unread.
"""

import hmac
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fp8refit import __version__
from fp8refit.errors import EngineBusyError, EngineDirtyError, RankFailedError, TransportError
from fp8refit.remote import messages
from fp8refit.remote.messages import Reply, Request
from fp8refit.remote.servers.orders import Place
from fp8refit.transport.caught import Caught
from fp8refit.transport.vote import ErrorRecord
from fp8refit_vllm.compat import end_weight_update
from fp8refit_vllm.letters import PROTOCOL, Invitation, Letter, Presence
from fp8refit_vllm.mailbox import Address, Mailbox

M = TypeVar("M", bound=BaseModel)

logger = logging.getLogger(__name__)

FINDING_S = 30.0
"""How long a rank looks for a trainer's mailbox."""
PRESENCE = "presence"
"""The letter that an invitation is answered to."""


class TransferRank:
    """The worker's side of one engine's weight transfer.

    Args:
        worker: A vLLM worker.
        answer: What answers a message to its `RankServer`.
        check: Raises why its engine cannot be refitted.
    """

    def __init__(self, worker: Any, answer: Callable[[str], str], check: Callable[[], None]) -> None:
        self._worker = worker
        self._answer = answer
        self._check = check
        self._mailbox: Mailbox | None = None
        self._is_updating = False
        self._has_answered = False

    def invite(self, asked: Mapping[str, Any]) -> None:
        """Answer a trainer from now on, instead of the one before. A refit that one did not finish is given up.

        Raises:
            RankFailedError: Nobody can be told that the invitation is none.
            TransportError: The trainer cannot be reached.
        """
        with Caught() as failed:
            mailbox = Mailbox.find(_read_address(asked), timeout_s=FINDING_S)
            with Caught() as unfit:
                _check_invitation(asked)
                self._check()
                self._take_leave()
            if unfit.error is None:
                self._mailbox = mailbox
            parallel = self._worker.vllm_config.parallel_config
            presence = Presence(
                rank=self._worker.rank,
                num_ranks=parallel.world_size,
                place=Place.here(),
                error=ErrorRecord.of(unfit.error) if unfit.error is not None else None,
            )
            mailbox.count(str(presence.rank), more=1)
            mailbox.leave(PRESENCE, presence.rank, presence.model_dump_json())
        if failed.error is not None:
            self._refuse(failed.take())

    def begin(self) -> None:
        """An update begins. Nothing is written yet."""
        self._is_updating = True

    def receive(self, asked: Mapping[str, Any]) -> None:
        """Do what a letter says, and answer it.

        Raises:
            RankFailedError: It is no letter, or none of the trainer that is answered.
        """
        with Caught() as failed:
            letter = _read(Letter, asked, "update_info")
            mailbox = self._require_mailbox(letter.token)
        if failed.error is not None:
            self._is_updating = False
            self._refuse(failed.take())
            return
        self._has_answered = True
        said = self._answer(letter.message)
        try:
            mailbox.leave(letter.id, self._worker.rank, said)
        except TransportError as error:
            logger.error(
                "rank %d did a part of a refit, and its trainer does not hear of it: %s", self._worker.rank, error
            )

    def finish(self) -> None:
        """The update is over.

        Raises:
            EngineDirtyError: It left parts of two policies.
        """
        self._is_updating = False
        if self._has_answered and self._ask(messages.Hello()).is_dirty:
            self._refuse(
                EngineDirtyError(
                    "the weights of this engine are parts of two policies: keep it paused until an update succeeds"
                )
            )

    def close(self) -> None:
        """Let go of the trainer and of its memory. Never raises: vLLM calls it as it shuts a worker down, too."""
        self._is_updating = False
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            with suppress(TransportError):
                mailbox.end("the engine's weight transfer was shut down")
        self._forget()

    def _take_leave(self) -> None:
        """Let go of the trainer before.

        Raises:
            EngineBusyError: It lives, and is in the middle of an update.
        """
        mailbox = self._mailbox
        if mailbox is None:
            return
        with suppress(TransportError):  # it died
            if self._is_updating and not mailbox.is_dropped():
                raise EngineBusyError("another trainer is in the middle of an update of this engine; wait for it")
            mailbox.end("another trainer was given this engine")
        self._mailbox, self._is_updating = None, False
        end_weight_update(self._worker)
        self._forget()

    def _forget(self) -> None:
        """Give up a refit under way, and unmap the trainer's memory."""
        if self._has_answered:
            self._has_answered = False
            self._ask(messages.Close())

    def _ask(self, order: messages.Order) -> Reply:
        return Reply.model_validate_json(self._answer(Request(id="", order=order).encode()))

    def _require_mailbox(self, token: str) -> Mailbox:
        if self._mailbox is None:
            raise RankFailedError("no trainer was given this engine; call init_weight_transfer_engine first")
        if not hmac.compare_digest(token.encode(), self._mailbox.address.token.encode()):
            raise RankFailedError("another trainer was given this engine since; call init_weight_transfer_engine again")
        return self._mailbox

    def _refuse(self, error: BaseException) -> None:
        """Let vLLM's call fail, and its update be over, on every rank alike."""
        end_weight_update(self._worker)
        if self._worker.rank == self._worker.vllm_config.parallel_config.world_size - 1:
            raise error
        logger.error("%s", error)


def _read_address(asked: Mapping[str, Any]) -> Address:
    """Whom to tell what is wrong with the rest of an invitation."""
    return _read(Address, asked.get("address"), "init_info.address")


def _check_invitation(asked: Mapping[str, Any]) -> None:
    """Check that the trainer is one of this version.

    Raises:
        RankFailedError: It is not.
    """
    protocol = asked.get("protocol")
    if protocol != PROTOCOL:
        raise RankFailedError(
            f"the trainer, fp8refit {asked.get('package_version')}, speaks protocol {protocol} of weight transfer, and this "
            f"rank, fp8refit {__version__}, speaks {PROTOCOL}; install the same version on both sides"
        )
    _read(Invitation, asked, "init_info")


def _read(kind: type[M], asked: Any, what: str) -> M:
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise RankFailedError(
            f"{what} is nothing that fp8refit {__version__} said ({said}): drive this engine by fp8refit_vllm.trainer, of the "
            "same version"
        ) from error
