"""The trainer's side of vLLM's weight transfer. A trainer written for vLLM's API only changes its init info.

Importing this module registers our backend with vLLM's factories, or raises `UnsupportedEngineError` if it has none.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError
from fp8refit.ranks.kv.calibration import Calibration, KvScaleValues
from fp8refit.report import RefitReport
from fp8refit_vllm.compat import BACKEND, TRANSFER, VERSIONS, register_transfer
from fp8refit_vllm.transfer_driver import TransferDriver
from fp8refit_vllm.weight_source import opened

with VERSIONS.importing(TRANSFER):
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

register_transfer()


@dataclass
class RefitTrainerInitInfo(TrainerInitInfo):
    """What one rank of a trainer passes to `trainer_init`. Rank 0 drives the engine."""

    backend: ClassVar[str] = BACKEND

    config: RefitConfig = field(default_factory=RefitConfig)
    """Options. With `transport="collective"` the engine may be on another host; then set `collective.host` to an
    address of rank 0's host."""

    port: int = 0
    """Port on `config.collective.host` to which the engine's ranks send their answers; 0 for any free one."""

    group: "ProcessGroup | None" = None
    """The trainer's ranks, all of which call `send_weights`; by default torch's world group."""


class RefitTrainer(TrainerWeightTransferEngine):  # two type parameters in 0.26, one since
    """Implements vLLM's `TrainerWeightTransferEngine`. Create it with `trainer_init`, on every rank of the trainer."""

    init_info_cls = RefitTrainerInitInfo

    def __init__(self, init_info: RefitTrainerInitInfo, *, client: "VLLMWeightSyncClient", source: Any) -> None:
        self.is_sender, self.rank = init_info.is_sender, getattr(init_info, "rank", 0)
        self.client = client
        self.source = source
        self._config, self._group = init_info.config, init_info.group
        self._driver = TransferDriver(client, init_info.config, port=init_info.port) if init_info.is_sender else None

    @classmethod
    def trainer_init(
        cls,
        init_info: RefitTrainerInitInfo,
        *,
        client: "VLLMWeightSyncClient",
        source: Any = None,
        config: object = None,
    ) -> Self:
        """Join the engine whose weights `client` reaches, as vLLM's trainers do.

        Args:
            init_info: This rank's options.
            client: A client with vLLM's four methods that reaches every rank of one engine.
            source: A `WeightSource`.
            config: Passed by vLLM 0.26; not used.

        Raises:
            InvalidSourceError: `source` is missing.
            RefitError: See `TransferDriver`.
        """
        if source is None:
            raise InvalidSourceError(["source: missing; pass a WeightSource with the whole policy"])
        return cls(init_info, client=client, source=source)

    @property
    def version(self) -> int:
        """Policy version that the engine serves; 0 on ranks that do not drive it."""
        return self._driver.ranks.version if self._driver is not None else 0

    @property
    def is_dirty(self) -> bool:
        """Whether the engine holds parts of two policies: keep it paused until `send_weights` succeeds."""
        return self._driver is not None and self._driver.ranks.is_dirty

    def send_weights(
        self, *, calibration: Calibration | None = None, kv_scales: KvScaleValues | None = None
    ) -> RefitReport | None:
        """Refit the engine with the source's weights, all or nothing. Every rank of the trainer calls it.

        As with every vLLM backend, the caller pauses and resumes the engine: pause (which drops prefix caches unless
        requests are kept), send, resume. If this raises and the engine `is_dirty`, do not resume until a later call
        succeeds.

        Args:
            calibration: Token ids; see `Refitter.refit`. Do not calibrate while requests are kept: their KV has the old
                scales.
            kv_scales: See `Refitter.refit`.

        Returns:
            The report; None on ranks other than 0.

        Raises:
            RefitError: See `Refitter.refit`. Also `EngineLostError` if another trainer has taken over the engine.
        """
        with opened(self.source, self._group, self._config) as (weights, manifest):
            if self._driver is None:
                return None
            with self._driver.update() as refitter:
                return refitter.refit(weights, manifest=manifest, calibration=calibration, kv_scales=kv_scales)

    def fingerprints(self) -> list[str]:
        """Return a digest of each rank's live weights; empty where this process does not send."""
        if self._driver is None:
            return []
        with self._driver.update() as refitter:
            return refitter.fingerprints()

    def shutdown(self) -> None:
        """Make the engine's ranks unmap this process's memory, and release the engine."""
        if self._driver is not None:
            self._driver.close()
