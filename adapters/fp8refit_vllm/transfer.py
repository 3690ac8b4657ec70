"""The worker's side of vLLM's weight transfer: `--weight-transfer-config '{"backend": "fp8refit"}'`.

vLLM imports this module if that backend is configured. A trainer's messages go to the worker's `RankServer`, as on every
other way in, and the answers to the trainer's board. Weights are written in place, not reloaded layer by layer.

An error that no trainer can be told of is the same on every rank, and only the last rank raises it: vLLM stops reading
answers at the first rank that raised, and its next call would then receive the unread ones.
"""

import hmac
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from pydantic import ValidationError
from torch import nn
from typing_extensions import override

from fp8refit import __version__
from fp8refit.errors import (
    EngineBusyError,
    EngineDirtyError,
    RankFailedError,
    TransportError,
    UnsupportedEngineError,
)
from fp8refit.remote.protocol.messages import Do, Reply, Request, first_problem
from fp8refit.transport.collective.board import Board
from fp8refit.transport.error_capture import ErrorCapture
from fp8refit.transport.vote import ErrorRecord
from fp8refit_vllm.clients import check_connectors
from fp8refit_vllm.compat import TRANSFER, VERSIONS, booting_worker, end_weight_update, is_updating
from fp8refit_vllm.transfer_driver import Letter
from fp8refit_vllm.worker import rank_of, serve

with VERSIONS.importing(TRANSFER):
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

logger = logging.getLogger(__name__)

FINDING_S = 30.0
"""Time limit in seconds for connecting to a trainer's board."""
_TAKEN_OVER = "another trainer has taken over this engine"


class RefitTransferEngine(WeightTransferEngine[Any, Any]):
    """Implements vLLM's `WeightTransferEngine`; `fp8refit_vllm.trainer.RefitTrainer` drives it.

    Raises:
        UnsupportedEngineError: It was not created by a vLLM worker.
    """

    init_info_cls = update_info_cls = dict
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._worker = booting_worker()
        if self._worker is None:
            raise UnsupportedEngineError("this version of vLLM does not create weight-transfer engines in its workers")
        self._board: Board | None = None

    @override
    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        """Check nothing yet: an error here would be raised by every rank."""
        return init_dict

    parse_update_info = parse_init_info

    @override
    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Serve a new trainer, instead of the previous one. A refit that the previous one left unfinished is abandoned."""
        with self._raised_once():
            letter = _read(init_info)
            board = Board.find(letter.address, 1 + self._worker.rank, timeout_s=FINDING_S)
            self._answer(board, self._take_over(board, letter.message))

    @override
    def start_weight_update(self) -> None:
        """Do nothing: a refit begins with its first message."""

    @override
    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(update_info)

    @override
    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Carry out a message of the current trainer."""
        with self._raised_once():
            letter, board = _read(update_info), self._board
            if board is None:
                raise RankFailedError("no trainer is connected to this engine; call init_weight_transfer_engine first")
            if not hmac.compare_digest(letter.address.token.encode(), board.address.token.encode()):
                raise RankFailedError(f"{_TAKEN_OVER}; call init_weight_transfer_engine again")
            self._answer(board, serve(self._worker, letter.message))

    @override
    def finish_weight_update(self) -> None:
        with self._raised_once():
            if self._board is not None and rank_of(self._worker).target.is_dirty:
                raise EngineDirtyError(
                    "this engine holds parts of two policies; keep it paused until an update succeeds"
                )

    @override
    def shutdown(self) -> None:
        """Never raises, because vLLM also calls it when a worker shuts down."""
        self._leave("the engine's weight transfer was shut down")

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> NoReturn:
        """Required by vLLM 0.26, and not supported.

        Raises:
            UnsupportedEngineError: Always.
        """
        raise UnsupportedEngineError("use WeightTransferTrainerFactory with fp8refit_vllm.trainer.RefitTrainerInitInfo")

    def _take_over(self, board: Board, message: str) -> str:
        """Serve a new trainer instead of the previous one, if its first message succeeds. Returns the answer to that."""
        with ErrorCapture() as failed:
            _check_is_alone(self.vllm_config.parallel_config)
            check_connectors(self.vllm_config)
            said = serve(self._worker, message)
            if Reply.model_validate_json(said).error is None:
                if self._is_in_use():
                    raise EngineBusyError("another trainer is in the middle of an update of this engine; wait for it")
                self._leave(_TAKEN_OVER)
                self._board = board
            return said
        return Reply(id="", error=ErrorRecord.of(failed.take())).encode()

    def _is_in_use(self) -> bool:
        """Whether the current trainer is alive and in the middle of an update."""
        with suppress(TransportError):  # it died
            return self._board is not None and is_updating(self._worker) and not self._board.first_word()
        return False

    def _leave(self, why: str) -> None:
        """Drop the trainer, abandon its refit, and unmap its memory."""
        board, self._board = self._board, None
        if board is not None:
            board.abort(why)
            end_weight_update(self._worker)
            serve(self._worker, Request(id="", order=Do(step="close")).encode())

    def _answer(self, board: Board, said: str) -> None:
        try:
            board.send(str(self._worker.rank), said)
        except TransportError as error:
            logger.error("rank %d cannot answer the trainer: %s", self._worker.rank, error)

    @contextmanager
    def _raised_once(self) -> Iterator[None]:
        """After an error, end the update on every rank, and make vLLM's call fail by raising on the last rank."""
        with ErrorCapture() as failed:
            yield
        if failed.error is None:
            return
        end_weight_update(self._worker)
        if self._worker.rank == self.vllm_config.parallel_config.world_size - 1:
            raise failed.take()
        logger.error("%s", failed.take())


def _check_is_alone(parallel: Any) -> None:
    """Refuse a worker of one of several replicas, whose ranks have the same numbers.

    Raises:
        UnsupportedEngineError: It is one.
    """
    # A replica that steps alone is told that it is the only one, but not that it is the first.
    is_one_of_many = parallel.data_parallel_index > 0 and not parallel.data_parallel_external_lb
    if parallel.data_parallel_size > 1 or is_one_of_many:
        raise UnsupportedEngineError(
            "vLLM's weight transfer cannot tell the ranks of data-parallel replicas apart; refit the AsyncLLM or the server "
            "itself with fp8refit.Refitter"
        )


def _read(asked: Any) -> Letter:
    """Read what vLLM was given.

    Raises:
        RankFailedError: It is not a letter.
    """
    try:
        return Letter.model_validate(asked)
    except ValidationError as error:
        raise RankFailedError(
            f"this is not a message of fp8refit {__version__} ({first_problem(error)}); drive this engine "
            "with fp8refit_vllm.trainer of the same version"
        ) from error
