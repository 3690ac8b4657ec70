"""Drives one engine through vLLM's weight-transfer API, with any client that has vLLM's four methods.

It is an ordinary refit, except that messages travel through `update_weights` and answers through a mailbox.
"""

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.driver.attach import AttachedEngine
from fp8refit.driver.engine import Engine
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import EngineLostError, RankFailedError, RefitError, TransportError, UnsupportedEngineError
from fp8refit.ranks.kv.calibration import Calibration, KvScaleValues
from fp8refit.remote.channel import GRACE_S, Channel
from fp8refit.remote.ranks import RemoteRanks
from fp8refit.remote.servers.orders import Place
from fp8refit.report import RefitReport
from fp8refit.sources.source import Manifest, StateDict
from fp8refit.transport.vote import merge_errors
from fp8refit_vllm.compat import call_in_time, takes_version
from fp8refit_vllm.letters import Invitation, Letter, Presence
from fp8refit_vllm.mailbox import Mailbox
from fp8refit_vllm.transfer_rank import FINDING_S, PRESENCE

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NOT_CONFIGURED = (
    "boot the engine with weight_transfer_config={'backend': 'fp8refit'} where fp8refit is installed, and a server also "
    "with VLLM_SERVER_DEV_MODE=1; its log says more"
)


class Client(Protocol):
    """vLLM's `VLLMWeightSyncClient`."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See vLLM."""
        ...

    def start_weight_update(self) -> None:
        """See vLLM."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See vLLM."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See vLLM; `weight_version` exists since 0.32."""
        ...


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
        """See `Refitter.fingerprints`."""
        with self._update():
            return self._refitter.fingerprints()

    def close(self) -> None:
        """Make the ranks unmap this process's memory, as far as they can be reached, and close the connection."""
        with suppress(RefitError), self._update():
            self._refitter.close()
        self._channel.close()

    @contextmanager
    def _update(self) -> Iterator[None]:
        """VLLM's start and finish of an update. It ends with a version only if a new policy was written."""
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


def _read_presence(said: str) -> Presence:
    try:
        return Presence.model_validate_json(said)
    except ValidationError as error:
        raise RankFailedError(
            f"cannot read a rank's answer ({error}); install the same version of fp8refit on both sides"
        ) from error


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
