"""One worker's part in vLLM's weight transfer: answers a trainer's invitation and carries out its letters.

Answers go to the trainer's mailbox, because vLLM returns none. An error that cannot go to a mailbox is the same on
every rank, and only the last rank raises it: vLLM stops reading answers at the first rank that raised, and its next
call would then receive the unread ones.
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
from fp8refit.transport.error_capture import ErrorCapture
from fp8refit.transport.vote import ErrorRecord
from fp8refit_vllm.compat import end_weight_update
from fp8refit_vllm.letters import PROTOCOL, Invitation, Letter, Presence
from fp8refit_vllm.mailbox import Address, Mailbox

M = TypeVar("M", bound=BaseModel)

logger = logging.getLogger(__name__)

FINDING_S = 30.0
"""Time limit in seconds for connecting to a trainer's mailbox."""
PRESENCE = "presence"
"""The key under which an invitation is answered."""


class TransferRank:
    """Takes part in weight transfers on behalf of one worker.

    Args:
        worker: A vLLM worker.
        answer: Passes a message to the worker's `RankServer` and returns the answer.
        check: Raises if the engine cannot be refitted.
    """

    def __init__(self, worker: Any, answer: Callable[[str], str], check: Callable[[], None]) -> None:
        self._worker = worker
        self._answer = answer
        self._check = check
        self._mailbox: Mailbox | None = None
        self._is_updating = False
        self._has_answered = False

    def invite(self, asked: Mapping[str, Any]) -> None:
        """Serve a new trainer, instead of the previous one. A refit that the previous one left unfinished is abandoned.

        Raises:
            RankFailedError: The invitation is malformed and names no mailbox.
            TransportError: The trainer cannot be reached.
        """
        with ErrorCapture() as failed:
            mailbox = Mailbox.find(_read_address(asked), timeout_s=FINDING_S)
            with ErrorCapture() as unfit:
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
        """Mark the beginning of an update. Nothing is written yet."""
        self._is_updating = True

    def receive(self, asked: Mapping[str, Any]) -> None:
        """Carry out a letter and answer it.

        Raises:
            RankFailedError: It is not a letter, or not from the current trainer.
        """
        with ErrorCapture() as failed:
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
                "rank %d did part of a refit but cannot report it to the trainer: %s", self._worker.rank, error
            )

    def finish(self) -> None:
        """Mark the end of an update.

        Raises:
            EngineDirtyError: The engine holds parts of two policies.
        """
        self._is_updating = False
        if self._has_answered and self._ask(messages.Do(step="hello")).is_dirty:
            self._refuse(
                EngineDirtyError("this engine holds parts of two policies; keep it paused until an update succeeds")
            )

    def close(self) -> None:
        """Drop the trainer and unmap its memory. Never raises, because vLLM also calls it when a worker shuts down."""
        self._is_updating = False
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            with suppress(TransportError):
                mailbox.end("the engine's weight transfer was shut down")
        self._forget()

    def _take_leave(self) -> None:
        """Drop the previous trainer.

        Raises:
            EngineBusyError: The previous trainer is alive and in the middle of an update.
        """
        mailbox = self._mailbox
        if mailbox is None:
            return
        with suppress(TransportError):  # the previous trainer died
            if self._is_updating and not mailbox.is_dropped():
                raise EngineBusyError("another trainer is in the middle of an update of this engine; wait for it")
            mailbox.end("another trainer has taken over this engine")
        self._mailbox, self._is_updating = None, False
        end_weight_update(self._worker)
        self._forget()

    def _forget(self) -> None:
        """Abandon a refit in progress, and unmap the trainer's memory."""
        if self._has_answered:
            self._has_answered = False
            self._ask(messages.Do(step="close"))

    def _ask(self, order: messages.Order) -> Reply:
        return Reply.model_validate_json(self._answer(Request(id="", order=order).encode()))

    def _require_mailbox(self, token: str) -> Mailbox:
        if self._mailbox is None:
            raise RankFailedError("no trainer is connected to this engine; call init_weight_transfer_engine first")
        if not hmac.compare_digest(token.encode(), self._mailbox.address.token.encode()):
            raise RankFailedError("another trainer has taken over this engine; call init_weight_transfer_engine again")
        return self._mailbox

    def _refuse(self, error: BaseException) -> None:
        """End the update on every rank, and make vLLM's call fail by raising on the last rank."""
        end_weight_update(self._worker)
        if self._worker.rank == self._worker.vllm_config.parallel_config.world_size - 1:
            raise error
        logger.error("%s", error)


def _read_address(asked: Mapping[str, Any]) -> Address:
    """Read the mailbox's address, so that other errors in the invitation can be reported to it."""
    return _read(Address, asked.get("address"), "init_info.address")


def _check_invitation(asked: Mapping[str, Any]) -> None:
    """Check that trainer and rank speak the same protocol.

    Raises:
        RankFailedError: They do not.
    """
    protocol = asked.get("protocol")
    if protocol != PROTOCOL:
        raise RankFailedError(
            f"the trainer (fp8refit {asked.get('package_version')}) uses weight-transfer protocol {protocol}, this "
            f"rank (fp8refit {__version__}) uses {PROTOCOL}; install the same version on both sides"
        )
    _read(Invitation, asked, "init_info")


def _read(kind: type[M], asked: Any, what: str) -> M:
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise RankFailedError(
            f"{what} is not a message of fp8refit {__version__} ({said}); drive this engine with fp8refit_vllm.trainer "
            "of the same version"
        ) from error
