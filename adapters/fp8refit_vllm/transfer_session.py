"""Drives one engine through vLLM's weight-transfer API, with any client that has vLLM's four methods.

It is an ordinary refit, except that messages travel through `update_weights` and answers through a mailbox.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.driver.attach import AttachedEngine
from fp8refit.driver.engine import Engine
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import EngineLostError, RankFailedError, RefitError, TransportError, UnsupportedEngineError
from fp8refit.ranks.kv.calibration import Calibration, KvScaleValues
from fp8refit.remote.channel import GRACE_S
from fp8refit.remote.ranks import RemoteRanks
from fp8refit.remote.servers.orders import Place
from fp8refit.report import RefitReport
from fp8refit.sources.source import Manifest, StateDict
from fp8refit.transport.vote import merge_errors
from fp8refit_vllm.letters import Presence
from fp8refit_vllm.mailbox import Mailbox
from fp8refit_vllm.transfer_channel import Client, ClientChannel

logger = logging.getLogger(__name__)


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
        self._mailbox = Mailbox.open(host=config.collective.host, port=port, timeout_s=config.timeout_s)
        self._channel = ClientChannel(client, self._mailbox)
        present = self._channel.invite(config.timeout_s)
        _check_presence(present, config)
        self._config = config
        self._refitter = Refitter(_Controls(self._channel), config)

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
        with self._update():
            return self._refitter.refit(state_dict, manifest=manifest, calibration=calibration, kv_scales=kv_scales)

    def fingerprints(self) -> list[str]:
        """Return a digest of each rank's live weights, in an update of its own."""
        with self._update():
            return self._refitter.fingerprints()

    def close(self) -> None:
        """Make the ranks unmap this process's memory, as far as they can be reached, and close the connection."""
        with suppress(RefitError), self._update():
            self._refitter.close()
        self._channel.close()

    @contextmanager
    def _update(self) -> Iterator[None]:
        """Start and finish an update through vLLM's API. vLLM gets a version only if a new policy was written."""
        timeout_s, version = self._config.timeout_s + GRACE_S, self.version
        self._channel.start(timeout_s)
        try:
            yield
        except EngineLostError:
            self._channel.close()
            raise
        except BaseException:
            with suppress(RefitError):  # the caller must see the ranks' error
                self._channel.finish(None, timeout_s)
            raise
        try:
            self._channel.finish(self.version if self.version != version else None, timeout_s)
        except RankFailedError as error:
            raise RankFailedError(
                f"version {self.version} is in place, but the update could not be finished: {error}"
            ) from error


class _Controls(Engine):
    """Implements `fp8refit.driver.engine.Engine` without touching requests: the caller of the update pauses them.

    Args:
        channel: Reaches the ranks.
    """

    name = "vllm"
    is_asynchronous = False

    def __init__(self, channel: ClientChannel) -> None:
        self.ranks = RemoteRanks(channel)
        self._fp8refit_engine = AttachedEngine(self)

    @override
    async def check_ready(self) -> None:
        return

    @override
    async def pause(self, config: RefitConfig) -> int:
        return 0

    @override
    async def resume(self) -> None:
        return

    @override
    async def refuse(self, reason: str) -> None:
        logger.error("keep the engine paused: %s", reason)

    @override
    async def flush_caches(self) -> None:
        return

    @override
    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """Not possible: only the engine has a tokenizer.

        Raises:
            UnsupportedEngineError: Always.
        """
        raise UnsupportedEngineError("calibration: pass token ids; prompts need the engine's tokenizer")

    @override
    async def publish_version(self, version: int) -> None:
        """Nothing to do: `finish` passes the version to vLLM."""


def _check_presence(present: Sequence[Presence], config: RefitConfig) -> None:
    """Check that every rank can be refitted from this process.

    Raises:
        RefitError: A rank cannot.
    """
    failed = {one.rank: one.error for one in present if one.error is not None}
    if failed:
        raise merge_errors(failed, num_ranks=len(present))
    here = Place.here()
    if config.transport != "collective" and any(one.place != here for one in present):
        raise TransportError(
            "the engine runs on another host or in another container than this trainer and cannot map its memory; set "
            'RefitConfig(transport="collective", collective={"host": ...}) with an address of this host'
        )
