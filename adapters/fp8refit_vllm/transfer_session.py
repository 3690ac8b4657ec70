"""The trainer's side of vLLM's weight transfer, over any client that has vLLM's four methods.

A refit goes the way of every other; only its messages go through `update_weights`, and their answers through a mailbox.
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
    "boot the engine with weight_transfer_config={'backend': 'fp8refit'} where fp8refit is installed, and a server with "
    "VLLM_SERVER_DEV_MODE=1; its log says more"
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
        """See vLLM: without `weight_version` before 0.32."""
        ...


class TransferSession:
    """One engine, and what is kept from one update of it to the next.

    Args:
        client: Reaches the engine.
        config: How to refit. The ranks answer at `config.collective.host`.
        port: There; 0 for any that is free.

    Raises:
        UnsupportedEngineError: The engine has no such weight transfer, or cannot be refitted.
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
        """Policy version that the engine serves."""
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
        """Bring the engine to a policy in one update. See `Refitter.refit` for arguments and errors."""
        with self._update():
            return self._refitter.refit(state_dict, manifest=manifest, calibration=calibration, kv_scales=kv_scales)

    def fingerprints(self) -> list[str]:
        """See `Refitter.fingerprints`."""
        with self._update():
            return self._refitter.fingerprints()

    def close(self) -> None:
        """Have the ranks let go of this process's memory, and end. What cannot be reached any more is left."""
        with suppress(RefitError), self._update():
            self._refitter.close()
        self._channel.close()

    @contextmanager
    def _update(self) -> Iterator[None]:
        """What vLLM calls an update. It names a version if a policy was brought, and none otherwise."""
        timeout_s, version = self._config.timeout_s + GRACE_S, self.version
        self._channel.start(timeout_s)
        try:
            yield
        except EngineLostError:
            self._channel.close()
            raise
        except BaseException:
            with suppress(RefitError):  # the ranks' error is the one to tell
                self._channel.finish(None, timeout_s)
            raise
        try:
            self._channel.finish(self.version if self.version != version else None, timeout_s)
        except RankFailedError as error:
            raise RankFailedError(
                f"version {self.version} is in place, and its update was not ended: {error}"
            ) from error


class ClientChannel(Channel):
    """Implements `fp8refit.remote.channel.Channel` over a client. One call at a time.

    Args:
        client: Reaches the engine.
        mailbox: Where its ranks leave their answers.
    """

    def __init__(self, client: Client, mailbox: Mailbox) -> None:
        self._client = client
        self._mailbox: Mailbox | None = mailbox
        self._num_ranks = 0
        self._turn = threading.Lock()

    def invite(self, timeout_s: float) -> list[Presence]:
        """Have every rank of the engine answer this trainer from now on.

        Raises:
            UnsupportedEngineError: The engine has no such weight transfer, or the client reaches less or more than one engine.
            TransportError: The ranks do not reach the mailbox.
            EngineLostError: The engine does not answer.
            RankFailedError: Something else answers.
        """
        mailbox = self._require_mailbox()
        invitation = Invitation(address=mailbox.address).encode()
        try:
            self._ask(lambda: self._client.init_weight_transfer_engine(invitation), timeout_s + FINDING_S)
        except EngineLostError:
            raise
        except RankFailedError as error:
            raise UnsupportedEngineError(
                f"this engine takes no weights from fp8refit ({error}); {_NOT_CONFIGURED}"
            ) from error
        said = mailbox.collect(PRESENCE, 0)
        if said is None:
            raise TransportError(
                f"no rank of the engine came to {mailbox.address.host}:{mailbox.address.port}; give RefitConfig.collective a "
                "host of this trainer's that the engine's hosts can reach"
            )
        present = [_read_presence(said)]
        self._num_ranks = present[0].num_ranks
        others = [mailbox.collect(PRESENCE, rank) for rank in range(1, self._num_ranks)]
        present += [_read_presence(said) for said in others if said is not None]
        if mailbox.count("0") > 1:
            raise UnsupportedEngineError(
                "this client reaches several engines; make one client, and one trainer, for each"
            )
        if len(present) < self._num_ranks:
            raise UnsupportedEngineError(
                f"{len(present)} of {self._num_ranks} ranks of the engine came; the client has to reach all of them, and they "
                f"{mailbox.address.host}:{mailbox.address.port}"
            )
        return present

    def start(self, timeout_s: float) -> None:
        """Begin an update.

        Raises:
            EngineLostError: The engine does not answer.
            RankFailedError: It does not begin one.
        """
        self._check_is_ours()
        self._ask(self._client.start_weight_update, timeout_s)

    def finish(self, version: int | None, timeout_s: float) -> None:
        """End an update.

        Args:
            version: Of the policy that it brought, for outputs to show where vLLM does that.
            timeout_s: Seconds to wait.

        Raises:
            EngineLostError: The engine does not answer.
            RankFailedError: It does not end it.
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
                f"a call to the engine's ranks failed ({error}): its log says why. Make a new trainer; if that fails too, "
                "start the engine again"
            ) from error
        answers = [mailbox.collect(letter.id, rank) for rank in range(self._num_ranks)]
        absent = [rank for rank, answer in enumerate(answers) if answer is None]
        if absent:
            self._check_is_ours()
            ranks = ", ".join(map(str, absent))
            raise EngineLostError(f"rank(s) {ranks} did not answer; their log says why. Make a new trainer")
        return [answer for answer in answers if answer is not None]

    @override
    async def begin(self, message: str, *, timeout_s: float) -> None:
        """Cannot: vLLM's clients wait for the end of what they were asked."""

    def close(self) -> None:
        """Let go of the engine, which another trainer may then be given, in the middle of an update or not."""
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            mailbox.drop()

    def _require_mailbox(self) -> Mailbox:
        if self._mailbox is None:
            raise EngineLostError("this trainer was shut down, or lost its engine; make a new one")
        return self._mailbox

    def _check_is_ours(self) -> None:
        """Check that the ranks still answer this trainer.

        Raises:
            EngineLostError: They do not.
        """
        why = self._require_mailbox().why_ended()
        if why is not None:
            raise EngineLostError(f"the engine does not answer this trainer any more: {why}. Make a new trainer")

    def _ask(self, call: Callable[[], T], timeout_s: float) -> T:
        """Call the client, in a thread of its own, after the call before, and wait.

        Raises:
            EngineLostError: It takes longer, or the engine is not there.
            RankFailedError: It raised something else.
        """

        def call_in_turn() -> T:
            with self._turn:
                return call()

        try:
            return call_in_time(call_in_turn, timeout_s)
        except Exception as error:  # clients raise whatever carries them
            if isinstance(error, RefitError):
                raise RankFailedError(str(error)) from error
            if isinstance(error, OSError) and getattr(error, "response", None) is None:
                raise EngineLostError(
                    f"the engine did not answer within {timeout_s:g} s, or is gone ({type(error).__name__}: {error}); start it "
                    "again. If it only takes longer, raise timeout_s, and the client's own"
                ) from error
            raise RankFailedError(f"vLLM raised {type(error).__name__}: {error}") from error


class _Controls(Engine):
    """Implements `fp8refit.driver.engine.Engine` where requests are somebody else's: who drives the update pauses them.

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
        """See `fp8refit.driver.engine.Engine`.

        Raises:
            UnsupportedEngineError: The tokenizer is the engine's.
        """
        raise UnsupportedEngineError("calibration: pass token ids; prompts would need the engine's tokenizer")

    @override
    async def publish_version(self, version: int) -> None:
        """The end of the update names it."""


def _read_presence(said: str) -> Presence:
    try:
        return Presence.model_validate_json(said)
    except ValidationError as error:
        raise RankFailedError(
            f"a rank of the engine says what this version of fp8refit does not know ({error}); install the same for both"
        ) from error


def _check_presence(present: Sequence[Presence], config: RefitConfig) -> None:
    """Check that every rank can be refitted from here.

    Raises:
        RefitError: One cannot.
    """
    failed = {one.rank: one.error for one in present if one.error is not None}
    if failed:
        raise merge_errors(failed, num_ranks=len(present))
    here = Place.here()
    if config.transport != "collective" and any(one.place != here for one in present):
        raise TransportError(
            "the engine runs on another host than this trainer, or in another container, and cannot map its memory; set "
            'RefitConfig(transport="collective", collective={"host": ...}) with an address of this host'
        )
