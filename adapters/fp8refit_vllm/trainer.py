"""The trainer's side of vLLM's weight transfer: what a trainer that is written against vLLM's API changes is its init info.

Importing this makes the backend known to vLLM's factories, as vLLM's plugins do where an engine runs.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError
from fp8refit.ranks.kv.calibration import Calibration, KvScaleValues
from fp8refit.report import RefitReport
from fp8refit_vllm.compat import register_transfer
from fp8refit_vllm.letters import BACKEND, TRAINER_TRANSFER, WORKER_TRANSFER
from fp8refit_vllm.transfer_session import Client, TransferSession
from fp8refit_vllm.weight_source import opened

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

register_transfer(BACKEND, WORKER_TRANSFER, TRAINER_TRANSFER)


@dataclass
class RefitTrainerInitInfo(TrainerInitInfo):
    """How one rank of a trainer takes part. Rank 0 drives the engine."""

    backend: ClassVar[str] = BACKEND

    config: RefitConfig = field(default_factory=RefitConfig)
    """How to refit. With `transport="collective"` engines may be on other hosts; `collective.host` is then an address of rank
    0's host."""

    port: int = 0
    """At which the engine's ranks answer, on `config.collective.host`; 0 for any that is free."""

    group: "ProcessGroup | None" = None
    """The trainer's ranks, all of which call `send_weights`; by default all that torch knows of."""


class RefitTrainer(TrainerWeightTransferEngine):  # of two parameters in 0.26, of one since
    """Implements vLLM's `TrainerWeightTransferEngine`. Make one by `trainer_init`, on every rank of the trainer."""

    init_info_cls = RefitTrainerInitInfo

    def __init__(self, init_info: RefitTrainerInitInfo, *, client: Client, source: Any) -> None:
        self.is_sender, self.rank = init_info.is_sender, getattr(init_info, "rank", 0)
        self.client = client
        self.source = source
        self._config, self._group = init_info.config, init_info.group
        self._session = TransferSession(client, init_info.config, port=init_info.port) if init_info.is_sender else None

    @classmethod
    def trainer_init(
        cls, init_info: RefitTrainerInitInfo, *, client: Client, source: Any = None, config: object = None
    ) -> Self:
        """See vLLM.

        Args:
            init_info: How this rank takes part.
            client: Has vLLM's four methods, and reaches every rank of one engine.
            source: A `WeightSource`.
            config: What vLLM 0.26 gives its trainer engines; not used.

        Raises:
            InvalidSourceError: There is no source.
            RefitError: See `TransferSession`.
        """
        if source is None:
            raise InvalidSourceError(["source: there is none; fp8refit sends a whole policy, from a WeightSource"])
        return cls(init_info, client=client, source=source)

    @property
    def version(self) -> int:
        """Policy version that the engine serves; 0 on ranks that do not drive it."""
        return self._session.version if self._session is not None else 0

    @property
    def is_dirty(self) -> bool:
        """Whether the engine holds parts of two policies: keep it paused until `send_weights` succeeds."""
        return self._session is not None and self._session.is_dirty

    def send_weights(
        self, *, calibration: Calibration | None = None, kv_scales: KvScaleValues | None = None
    ) -> RefitReport | None:
        """Make the engine serve the source's weights: wholly, or with an error and not at all. Every rank calls it.

        Neither pauses the engine nor drops what it has cached, which is the caller's, as with every backend of vLLM: pause
        (which drops prefix caches unless requests are kept), send, resume. After an error, if the engine `is_dirty`, do not
        resume before a later call succeeded.

        Args:
            calibration: Token ids; see `Refitter.refit`. Not while requests are kept: their KV has the old scales.
            kv_scales: See there.

        Returns:
            What was done; None on ranks that do not drive.

        Raises:
            RefitError: See `Refitter.refit`. EngineLostError also if another trainer was given the engine.
        """
        with opened(self.source, self._group, self._config) as (weights, manifest):
            if self._session is None:
                return None
            return self._session.send(weights, manifest=manifest, calibration=calibration, kv_scales=kv_scales)

    def fingerprints(self) -> list[str]:
        """See `Refitter.fingerprints`."""
        return self._session.fingerprints() if self._session is not None else []

    def shutdown(self) -> None:
        """Have the engine's ranks let go of this process's memory, and end."""
        if self._session is not None:
            self._session.close()
