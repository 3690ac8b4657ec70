"""Drives one engine through vLLM's weight-transfer API, with any client that has vLLM's four methods.

`update_weights` carries messages to the ranks and returns nothing, so the ranks answer on a board that the trainer opens.
"""

import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, takewhile
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel
from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.driver.attach import AttachedEngine
from fp8refit.driver.engine import Engine
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import EngineLostError, RankFailedError, RefitError, TransportError, UnsupportedEngineError
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.channel import GRACE_S, Answers, Channel
from fp8refit.remote.ranks import RemoteRanks
from fp8refit.transport.collective.board import Address, Board
from fp8refit.transport.collective.store import open_store
from fp8refit.transport.running import run
from fp8refit_vllm.compat import takes_version
from fp8refit_vllm.core_compat import call_in_time

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NOT_CONFIGURED = (
    "boot the engine with weight_transfer_config={'backend': 'fp8refit'} where the same version of fp8refit is installed, "
    "and a server also with VLLM_SERVER_DEV_MODE=1; its log says more"
)


class Letter(BaseModel, frozen=True, extra="forbid"):
    """What vLLM's methods carry: a `fp8refit.remote.protocol.messages.Request` to every rank, and where to answer it: on the
    board, under the number of the rank.
    """

    address: Address
    message: str


class TransferDriver(Engine, Channel):
    """A trainer's connection to one engine, for any number of updates. Does not touch requests: the trainer pauses them.

    Args:
        client: Reaches every rank of the engine.
        config: Options. The ranks answer at `config.collective.host`.
        port: Port on that host; 0 for any free one.

    Raises:
        UnsupportedEngineError: The engine was not booted with this weight transfer, or cannot be refitted.
        TransportError: Trainer and engine cannot reach each other, or each other's memory.
        EngineBusyError: Another trainer is in the middle of an update.
        EngineLostError: The engine does not answer.
    """

    name = "vllm"
    is_asynchronous = False
    num_at_once = 1

    def __init__(self, client: "VLLMWeightSyncClient", config: RefitConfig, *, port: int) -> None:
        host = config.collective.host
        store, token, port = open_store(host=host, port=port, timeout_s=config.timeout_s)
        self._client = client
        self._board: Board | None = Board(Address(token=token, host=host, port=port), 0, store)
        self._num_ranks = 0
        self._turn = threading.Lock()
        self._config = config
        self._fp8refit_engine = AttachedEngine(self)
        self.ranks = RemoteRanks(self)
        self.ranks.client.config = config
        self._check_ranks(run(self.ranks.client.ask(messages.Do(step="hello"))))

    @override
    async def send(self, messages: Sequence[str], timeouts_s: Sequence[float], *, begins: bool) -> Awaitable[Answers]:
        return self._call(messages[0], timeouts_s[0])

    async def _call(self, message: str, timeout_s: float) -> Answers:
        """Send a message. The first one connects every rank of the engine to this trainer."""
        board, is_first = self._require_board(), not self._num_ranks
        letter = Letter(address=board.address, message=message).model_dump()
        send = self._client.init_weight_transfer_engine if is_first else self._client.update_weights
        try:
            self._ask(partial(send, letter), timeout_s)
        except RankFailedError as error:
            if is_first:
                raise UnsupportedEngineError(
                    f"this engine does not accept weights from fp8refit ({error}); {_NOT_CONFIGURED}"
                ) from error
            self._check_is_ours()
            raise EngineLostError(
                f"a call to the engine's ranks failed ({error}); its log says why. Create a new trainer; if that fails "
                "too, restart the engine"
            ) from error
        words = list(takewhile(bool, map(board.take, map(str, count()))))
        if is_first and any(len(of_rank) > 1 for of_rank in words):
            raise UnsupportedEngineError(
                "this client reaches several engines; create one client and one trainer for each"
            )
        if is_first and not words:
            raise TransportError(
                f"no rank of the engine connected to {board.address.host}:{board.address.port}; set "
                "RefitConfig.collective.host to an address of this trainer's host that the engine's hosts can reach"
            )
        if len(words) < self._num_ranks:
            raise EngineLostError(f"rank {len(words)} did not answer; its log says why. Create a new trainer")
        self._num_ranks = len(words)
        # Before the last word may come the answer to a call that was interrupted.
        return Answers(said=[of_rank[-1] for of_rank in words])

    @contextmanager
    def update(self) -> Iterator[Refitter]:
        """Start and finish an update through vLLM's API; yields what refits the engine in it.

        vLLM gets a version only if a new policy was written.
        """
        client, before, timeout_s = self._client, self.ranks.version, self._config.timeout_s + GRACE_S
        self._check_is_ours()
        self._ask(client.start_weight_update, timeout_s)
        try:
            yield Refitter(self, self._config)
        except EngineLostError:
            self._leave()
            raise
        except BaseException:
            with suppress(RefitError):  # the caller must see the ranks' error
                self._ask(client.finish_weight_update, timeout_s)
            raise
        version, finish = self.ranks.version, client.finish_weight_update
        if version != before and takes_version(client):
            finish = partial(finish, weight_version=str(version))
        try:
            self._ask(finish, timeout_s)
        except RankFailedError as error:
            raise RankFailedError(
                f"version {version} is in place, but the update could not be finished: {error}"
            ) from error

    def close(self) -> None:
        """Make the ranks unmap this process's memory, as far as they can be reached, and release the engine."""
        with suppress(RefitError), self.update() as refitter:
            refitter.close()
        self._leave()

    def _leave(self) -> None:
        """Release the engine for another trainer, even in the middle of an update."""
        board, self._board = self._board, None
        if board is not None:
            board.abort("the trainer was shut down")

    @override
    async def check_ready(self) -> None:
        """Do nothing, as `resume` and `flush_caches`: the trainer pauses requests, which drops caches, and resumes them."""

    resume = flush_caches = check_ready

    @override
    async def pause(self, config: RefitConfig) -> int:
        return 0

    @override
    async def refuse(self, reason: str) -> None:
        logger.error("keep the engine paused: %s", reason)

    @override
    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        raise UnsupportedEngineError("calibration: pass token ids; prompts need the engine's tokenizer")

    @override
    async def publish_version(self, version: int) -> None:
        """Do nothing: `update` passes the version to vLLM."""

    def _check_ranks(self, replies: Sequence[messages.Reply]) -> None:
        """Check that all ranks answered, and can be refitted from this process."""
        num_ranks, here = replies[0].num_ranks, messages.Place.here()
        if len(replies) < num_ranks:
            raise UnsupportedEngineError(
                f"{len(replies)} of {num_ranks} ranks of the engine connected; the client must reach all of them, and they "
                f"must reach {self._config.collective.host}"
            )
        if self._config.transport != "collective" and any(reply.place != here for reply in replies):
            raise TransportError(
                "the engine runs on another host or in another container than this trainer and cannot map its memory; set "
                'RefitConfig(transport="collective", collective={"host": ...}) with an address of this host'
            )

    def _require_board(self) -> Board:
        if self._board is None:
            raise EngineLostError("this trainer was shut down or has lost its engine; create a new one")
        return self._board

    def _check_is_ours(self) -> None:
        """Check that the ranks still serve this trainer: once an update, as it asks the store.

        Raises:
            EngineLostError: They do not.
        """
        if why := self._require_board().first_word():
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
            if isinstance(error, OSError) and getattr(error, "response", None) is None:
                raise EngineLostError(
                    f"the engine did not answer within {timeout_s:g} s or is gone ({type(error).__name__}: {error}); "
                    "restart it. If it is only slow, raise timeout_s and the client's own time limit"
                ) from error
            raise RankFailedError(f"vLLM raised {type(error).__name__}: {error}") from error
