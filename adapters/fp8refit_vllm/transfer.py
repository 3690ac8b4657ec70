"""The worker's side of vLLM's weight transfer: `--weight-transfer-config '{"backend": "fp8refit"}'`.

vLLM imports this module if that backend is configured. Weights are written in place, not reloaded layer by layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from typing_extensions import override
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from fp8refit.errors import UnsupportedEngineError
from fp8refit_vllm.clients import check_layout
from fp8refit_vllm.compat import booting_worker
from fp8refit_vllm.transfer_rank import TransferRank
from fp8refit_vllm.worker import serve


@dataclass
class Unread(WeightTransferInitInfo, WeightTransferUpdateInfo):
    """An unchecked message. It is validated later, where an error does not desynchronize vLLM's calls."""

    asked: dict[str, Any]


class RefitTransferEngine(WeightTransferEngine[Unread, Unread]):
    """Implements vLLM's `WeightTransferEngine`; `fp8refit_vllm.trainer.RefitTrainer` drives it. Messages are
    validated by `TransferRank`, which also synchronizes where needed.

    Raises:
        UnsupportedEngineError: It was not created by a vLLM worker.
    """

    init_info_cls = update_info_cls = Unread
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        worker = booting_worker()
        if worker is None:
            raise UnsupportedEngineError("this version of vLLM does not create weight-transfer engines in its workers")
        self._rank = TransferRank(worker, partial(serve, worker), partial(check_layout, vllm_config))

    @override
    def parse_init_info(self, init_dict: dict[str, Any]) -> Unread:
        return Unread(init_dict)

    @override
    def parse_update_info(self, update_dict: dict[str, Any]) -> Unread:
        return Unread(update_dict)

    @override
    def init_transfer_engine(self, init_info: Unread) -> None:
        self._rank.invite(init_info.asked)

    @override
    def start_weight_update(self) -> None:
        """Do nothing: a refit begins with its first message."""

    @override
    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    @override
    def receive_weights(self, update_info: Unread) -> None:
        self._rank.receive(update_info.asked)

    @override
    def finish_weight_update(self) -> None:
        self._rank.finish()

    @override
    def shutdown(self) -> None:
        self._rank.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> NoReturn:
        """Required by vLLM 0.26, and not supported.

        Raises:
            UnsupportedEngineError: Always.
        """
        raise UnsupportedEngineError("use WeightTransferTrainerFactory with fp8refit_vllm.trainer.RefitTrainerInitInfo")
