"""A trainer's connection to one engine over vLLM's weight-transfer API: an ordinary refit in each update."""

from contextlib import suppress

from fp8refit.config import RefitConfig
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import RefitError
from fp8refit.ranks.kv.calibration import Calibration, KvScaleValues
from fp8refit.report import RefitReport
from fp8refit.sources.source import Manifest, StateDict
from fp8refit_vllm.transfer_driver import Client, TransferDriver


class TransferSession:
    """A trainer's connection to one engine, used for any number of updates.

    Args:
        client: Reaches the engine.
        config: Options. The ranks send their answers to `config.collective.host`.
        port: Port on that host; 0 for any free one.

    Raises:
        UnsupportedEngineError: The engine was not booted with this weight transfer, or cannot be refitted.
        TransportError: Trainer and engine cannot reach each other, or each other's memory.
        EngineBusyError: Another trainer is in the middle of an update.
        EngineLostError: The engine does not answer.
    """

    def __init__(self, client: Client, config: RefitConfig, *, port: int = 0) -> None:
        self._driver = TransferDriver(client, config, port=port)
        self._refitter = Refitter(self._driver, config)

    @property
    def version(self) -> int:
        """The policy version that the engine serves."""
        return self._refitter.version

    @property
    def is_dirty(self) -> bool:
        """Whether the engine holds parts of two policies."""
        return self._refitter.is_dirty

    def send(
        self,
        state_dict: StateDict,
        *,
        manifest: Manifest | None = None,
        calibration: Calibration | None = None,
        kv_scales: KvScaleValues | None = None,
    ) -> RefitReport:
        """Refit the engine in one update. See `Refitter.refit` for arguments and errors."""
        with self._driver.update():
            return self._refitter.refit(state_dict, manifest=manifest, calibration=calibration, kv_scales=kv_scales)

    def fingerprints(self) -> list[str]:
        """Return a digest of each rank's live weights, in an update of its own."""
        with self._driver.update():
            return self._refitter.fingerprints()

    def close(self) -> None:
        """Make the ranks unmap this process's memory, as far as they can be reached, and close the connection."""
        with suppress(RefitError), self._driver.update():
            self._refitter.close()
        self._driver.close()
