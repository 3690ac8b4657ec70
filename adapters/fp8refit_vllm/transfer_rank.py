"""One worker's part in vLLM's weight transfer: carries out a trainer's letters, and answers on the trainer's board.

An error that no trainer can be told of is the same on every rank, and only the last rank raises it: vLLM stops reading
answers at the first rank that raised, and its next call would then receive the unread ones.
"""

import hmac
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ValidationError

from fp8refit import __version__
from fp8refit.errors import EngineBusyError, EngineDirtyError, RankFailedError, TransportError
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.messages import Reply, Request
from fp8refit.transport.collective.board import Address, Board
from fp8refit.transport.error_capture import ErrorCapture
from fp8refit.transport.vote import ErrorRecord
from fp8refit_vllm.compat import end_weight_update, is_updating

logger = logging.getLogger(__name__)

FINDING_S = 30.0
"""Time limit in seconds for connecting to a trainer's board."""


class Letter(BaseModel, frozen=True, extra="forbid"):
    """What vLLM's methods carry: a `fp8refit.remote.protocol.messages.Request` to every rank, and where to answer it: on the
    board, under the number of the rank.
    """

    address: Address
    message: str

    @classmethod
    def read(cls, asked: Mapping[str, Any]) -> "Letter":
        """Read what vLLM was given.

        Raises:
            RankFailedError: It is not a letter.
        """
        try:
            return cls.model_validate(asked)
        except ValidationError as error:
            raise RankFailedError(
                f"this is not a message of fp8refit {__version__} ({messages.first_problem(error)}); drive this engine "
                "with fp8refit_vllm.trainer of the same version"
            ) from error


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
        self._board: Board | None = None

    def invite(self, asked: Mapping[str, Any]) -> None:
        """Serve a new trainer, instead of the previous one. A refit that the previous one left unfinished is abandoned.

        Raises:
            RankFailedError: It is not a letter.
            TransportError: The trainer cannot be reached.
        """
        with ErrorCapture() as failed:
            letter = Letter.read(asked)
            board = Board.find(letter.address, 1 + self._worker.rank, timeout_s=FINDING_S)
            with ErrorCapture() as unfit:
                self._check()
                said = self._answer(letter.message)
                if (error := Reply.model_validate_json(said).error) is not None:
                    raise error.error()
                self._take_over()
                self._board = board
            if unfit.error is not None:
                said = Reply(id="", error=ErrorRecord.of(unfit.error)).encode()
            board.send(str(self._worker.rank), said)
        if failed.error is not None:
            self._refuse(failed.take())

    def receive(self, asked: Mapping[str, Any]) -> None:
        """Carry out a letter and answer it.

        Raises:
            RankFailedError: It is not a letter, or not from the current trainer.
        """
        with ErrorCapture() as failed:
            letter = Letter.read(asked)
            board = self._require_board(letter.address.token)
        if failed.error is not None:
            self._refuse(failed.take())
            return
        said = self._answer(letter.message)
        try:
            board.send(str(self._worker.rank), said)
        except TransportError as error:
            logger.error(
                "rank %d did part of a refit but cannot report it to the trainer: %s", self._worker.rank, error
            )

    def finish(self) -> None:
        """Mark the end of an update.

        Raises:
            EngineDirtyError: The engine holds parts of two policies.
        """
        if self._board is not None and self._ask(messages.Do(step="hello")).is_dirty:
            self._refuse(
                EngineDirtyError("this engine holds parts of two policies; keep it paused until an update succeeds")
            )

    def close(self, why: str = "the engine's weight transfer was shut down") -> None:
        """Drop the trainer, abandon its refit, and unmap its memory. Never raises, because vLLM also calls it when a worker
        shuts down.
        """
        board, self._board = self._board, None
        if board is not None:
            board.abort(why)
            end_weight_update(self._worker)
            self._ask(messages.Do(step="close"))

    def _take_over(self) -> None:
        """Drop the previous trainer.

        Raises:
            EngineBusyError: The previous trainer is alive and in the middle of an update.
        """
        if self._board is not None and is_updating(self._worker):
            with suppress(TransportError):  # it died
                if not self._board.first_word():
                    raise EngineBusyError("another trainer is in the middle of an update of this engine; wait for it")
        self.close("another trainer has taken over this engine")

    def _ask(self, order: messages.Order) -> Reply:
        return Reply.model_validate_json(self._answer(Request(id="", order=order).encode()))

    def _require_board(self, token: str) -> Board:
        if self._board is None:
            raise RankFailedError("no trainer is connected to this engine; call init_weight_transfer_engine first")
        if not hmac.compare_digest(token.encode(), self._board.address.token.encode()):
            raise RankFailedError("another trainer has taken over this engine; call init_weight_transfer_engine again")
        return self._board

    def _refuse(self, error: BaseException) -> None:
        """End the update on every rank, and make vLLM's call fail by raising on the last rank."""
        end_weight_update(self._worker)
        if self._worker.rank == self._worker.vllm_config.parallel_config.world_size - 1:
            raise error
        logger.error("%s", error)
