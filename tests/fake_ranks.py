"""A fake engine of several ranks, each in a thread of its own, and the two ways to drive one.

In `Drivers` every rank has a driver beside it, and all of them call alike (vLLM's external launcher). In `Remote` one driver
reaches every rank's `RankServer` over a channel.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fp8refit.ranks.target
from fp8refit import EngineLostError, Refitter
from fp8refit.driver.local_ranks import LocalRanks
from fp8refit.fill.fills import Prepared
from fp8refit.live.formats import BlockFormat, ScaleFormat
from fp8refit.live.parameters import live_tensors
from fp8refit.live.slots import (
    FP8_DTYPE,
    Inventory,
    PartlyRead,
    Refresh,
    Refusal,
    Slot,
    Stacked,
    TensorMeta,
)
from fp8refit.ranks.live_model import LiveModel
from fp8refit.ranks.rank import Rank
from fp8refit.ranks.target import Target
from fp8refit.ranks.write import Write
from fp8refit.remote.protocol.channel import Answers
from fp8refit.remote.protocol.messages import Request
from fp8refit.remote.rank_server import RankServer
from fp8refit.remote.ranks import RemoteRanks
from fp8refit.transport.running import InThread
from tests.fake_kv import FakeKvCache
from tests.fakes import FakeEngine, assert_slots_hold, live_bytes

HIDDEN = 192

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
BIAS = "model.layers.0.gate.e_score_correction_bias"
Q_PROJ = "model.layers.0.q_proj.weight"
K_PROJ = "model.layers.0.k_proj.weight"
O_PROJ = "model.layers.0.o_proj.weight"
UP_PROJ = "model.layers.0.up_proj.weight"
Q_PROJ_1 = "model.layers.1.q_proj.weight"
EXPERT_0, EXPERT_1 = (f"model.layers.0.experts.{index}.up_proj.weight" for index in range(2))

SHAPES = {
    EMBED: (10, HIDDEN),
    HEAD: (10, HIDDEN),
    NORM: (HIDDEN,),
    BIAS: (4,),
    Q_PROJ: (256, HIDDEN),
    Q_PROJ_1: (256, HIDDEN),
    K_PROJ: (128, HIDDEN),
    O_PROJ: (HIDDEN, 256),
    UP_PROJ: (320, HIDDEN),  # its second half starts off the 128 x 128 grid
    EXPERT_0: (128, HIDDEN),
    EXPERT_1: (128, HIDDEN),
}
EXPERTS = "model.layers.2.mlp.experts"
PARTS = {"gate_proj": (256, HIDDEN), "up_proj": (256, HIDDEN), "down_proj": (HIDDEN, 256)}
SHAPES |= {f"{EXPERTS}.{expert}.{part}.weight": shape for expert in range(2) for part, shape in PARTS.items()}
STACKS = {f"{EXPERTS}.gate_up_proj": ("gate_proj", "up_proj"), f"{EXPERTS}.down_proj": ("down_proj",)}
"""What a state dict makes of the experts of a layer: the parts of each, one above the other."""
FORMATS = {O_PROJ: BlockFormat(scale_format=ScaleFormat.UE8M0)}
UNQUANTIZED = {EMBED: torch.bfloat16, HEAD: torch.bfloat16, NORM: torch.bfloat16, BIAS: torch.float32}


def whole(name: str) -> tuple[str, int, int]:
    return name, 0, 1


def rows(name: str, rank: int) -> tuple[str, int, int]:
    return name, rank, 2


def columns(name: str, rank: int) -> tuple[str, int, int]:
    return name, rank, -2


def _tensor_parallel(rank: int) -> list[tuple[str, int, int]]:
    split = [rows(EMBED, rank), rows(Q_PROJ, rank), columns(O_PROJ, rank), rows(UP_PROJ, rank)]
    return [*split, whole(K_PROJ), whole(NORM), whole(BIAS)]


def experts(expert: int, rank: int, num_ranks: int) -> list[tuple[str, int, int]]:
    parts = (f"{EXPERTS}.{expert}.{part}.weight" for part in PARTS)
    return [(name, rank, -num_ranks if "down" in name else num_ranks) for name in parts]


_REPLICATED = [whole(Q_PROJ), whole(O_PROJ), whole(UP_PROJ), whole(K_PROJ), whole(NORM), whole(BIAS)]
LAYOUTS = {
    "tensor": [_tensor_parallel(0), _tensor_parallel(1)],
    "pipeline": [
        [whole(EMBED), whole(Q_PROJ), whole(O_PROJ)],
        [whole(Q_PROJ_1), whole(UP_PROJ), whole(NORM), whole(HEAD)],
    ],
    "expert": [
        [rows(Q_PROJ, 0), whole(NORM), whole(EXPERT_0)],
        [rows(Q_PROJ, 1), whole(NORM), whole(EXPERT_1)],
    ],
    "replicated": [_REPLICATED] * 2,
    "experts in parts": [[whole(NORM), *experts(0, rank, 2), *experts(1, rank, 2)] for rank in range(2)],
    "experts apart": [[whole(NORM), *experts(rank, 0, 1)] for rank in range(2)],
}
"""What each rank holds: the name of a checkpoint tensor, and which one of how many equal parts; of columns if negative."""
ONE_RANK = {"alone": [_REPLICATED]}
"""The layout of an engine of one rank; those above have two."""


class Shard(nn.Module):
    """What one rank holds, full of rubbish."""

    def __init__(self, parts: Sequence[tuple[str, int, int]]) -> None:
        super().__init__()
        self._slots = [self._make_slot(f"w{index}", *part) for index, part in enumerate(parts)]
        self._is_tied = any(name == EMBED and abs(count) == 2 for name, _, count in parts)
        self.register_buffer("total", torch.zeros(()))
        self.refusals: tuple[Refusal, ...] = ()
        self.partly_read: dict[str, PartlyRead] = {}
        self.kv: FakeKvCache | None = None
        self.on_refresh: Callable[[], object] = lambda: None

    def _make_slot(self, key: str, name: str, index: int, count: int) -> Slot:
        shape, offset = list(SHAPES[name]), [0] * len(SHAPES[name])
        dim = 0 if count > 0 else 1
        shape[dim] //= abs(count)
        offset[dim] = index * shape[dim]
        scale = None
        if name in UNQUANTIZED:
            weight = torch.full(shape, 9.0, dtype=UNQUANTIZED[name])
        else:
            weight = torch.full(shape, 0x11, dtype=torch.uint8).view(FP8_DTYPE)
            scale = torch.full([-(-length // 128) for length in shape], 9.0)
            self.register_buffer(f"{key}_scale", scale)
        self.register_parameter(key, nn.Parameter(weight, requires_grad=False))
        return Slot(
            name=name,
            full_shape=SHAPES[name],
            weight=weight,
            offset=tuple(offset),
            scale=scale,
            format=None if scale is None else FORMATS.get(name, BlockFormat()),
        )

    def slots(self) -> list[Slot]:
        return self._slots

    def read_inventory(self) -> Inventory:
        return Inventory(
            slots=tuple(self._slots),
            live=live_tensors(self),
            aliases={HEAD: EMBED} if self._is_tied else {},
            unneeded=("mtp.*",),
            refreshes=(Refresh(name="total", run=self._refresh),),
            stacked=tuple(self._stacks()),
            refusals=self.refusals,
            partly_read=self.partly_read,
            kv=self.kv.read() if self.kv is not None else None,
        )

    def _stacks(self) -> Iterator[Stacked]:
        """As the engines have them."""
        held = {slot.name for slot in self._slots}
        for name, parts in STACKS.items():
            num_rows, num_columns = PARTS[parts[0]]
            places = {
                f"{EXPERTS}.{expert}.{part}.weight": (expert, place * num_rows)
                for expert in range(2)
                for place, part in enumerate(parts)
            }
            mine = {part: place for part, place in places.items() if part in held}
            if mine:
                yield Stacked(name=name, shape=(2, len(parts) * num_rows, num_columns), parts=mine)

    def _refresh(self) -> None:
        self.total.fill_(sum(slot.weight.float().sum() for slot in self._slots if slot.scale is None))
        self.on_refresh()


def stack_experts(policy: dict[str, Tensor], *, is_transposed: bool = False) -> dict[str, Tensor]:
    """A policy as transformers 5 gives it: the matrices of all experts of a layer in one tensor."""
    stacked = {name: tensor for name, tensor in policy.items() if not name.startswith(EXPERTS)}
    for name, parts in STACKS.items():
        matrices = [torch.cat([policy[f"{EXPERTS}.{expert}.{part}.weight"] for part in parts]) for expert in range(2)]
        stack = torch.stack(matrices)
        stacked[name] = stack.mT.contiguous() if is_transposed else stack
    return stacked


LONGEST_WAIT_S = 20.0
"""A rank that waits for one that died outlives its test: an interpreter ends when all of its threads have."""


class Meeting:
    """Where the ranks of one engine meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.messages = [b""] * size


class ThreadGroup:
    """See `fp8refit.transport.vote.Group`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.size = meeting.barrier.parties
        self.num_exchanges = 0
        self._meeting = meeting

    def exchange(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        self.num_exchanges += 1
        self._meeting.messages[self.rank] = message
        timeout_s = min(timeout_s, LONGEST_WAIT_S)
        try:
            self._meeting.barrier.wait(timeout_s)
            messages = list(self._meeting.messages)
            self._meeting.barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise EngineLostError(f"a rank did not come within {timeout_s} s") from None
        return messages


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Do everything at once; what each call returned or raised."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - given back, to be judged
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(outcome, call) for call in calls]]


class Cluster:
    """The ranks themselves, without a driver.

    Args:
        layout: One of `LAYOUTS` or `ONE_RANK`.
        kv: Attention layers with an FP8 KV cache, of each rank; without any there is no such cache.
    """

    def __init__(self, layout: str = "tensor", *, kv: Sequence[Sequence[str]] = ()) -> None:
        self.shards = [Shard(parts) for parts in (LAYOUTS | ONE_RANK)[layout]]
        for shard, layers in zip(self.shards, kv, strict=False):
            shard.kv = FakeKvCache(*layers)
        meeting = Meeting(len(self.shards))
        self.groups = [ThreadGroup(meeting, rank) for rank in range(len(self.shards))]
        self.targets = [
            Target(shard.read_inventory, device=torch.device("cpu"), engine="fake", versions={"fake": "1.0"})
            for shard in self.shards
        ]
        self.ranks = [Rank(target, group) for target, group in zip(self.targets, self.groups, strict=True)]

    def make_policy(self, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        names = dict.fromkeys(slot.name for shard in self.shards for slot in shard.slots())
        return {name: torch.randn(SHAPES[name], generator=generator).to(dtype) for name in names}

    @property
    def slots(self) -> list[Slot]:
        """Of every rank."""
        return [slot for shard in self.shards for slot in shard.slots()]

    def live_bytes(self) -> list[dict[str, bytes]]:
        return [live_bytes(shard) for shard in self.shards]

    def assert_holds(self, policy: dict[str, Tensor], *, version: int) -> None:
        """Every byte of every rank is that of `policy`, and every rank says so."""
        for shard in self.shards:
            assert_slots_hold(shard.slots(), policy)
            assert shard.total == sum(slot.weight.float().sum() for slot in shard.slots() if slot.scale is None)
        assert self.states == [(False, version)] * len(self.shards)

    @property
    def caches(self) -> list[FakeKvCache]:
        return [shard.kv for shard in self.shards if shard.kv is not None]

    @property
    def scales(self) -> list[dict[str, float]]:
        return [cache.held for cache in self.caches]

    @property
    def states(self) -> list[tuple[bool, int]]:
        return [(target.is_dirty, target.version) for target in self.targets]


class Client:
    """What a user passes to `Refitter`."""

    def __init__(self, ranks: LocalRanks | RemoteRanks) -> None:
        self.ranks = ranks
        self.events: list[str] = []
        self.blocked: str | None = None
        self.is_busy = False
        self.flush_fails = False


class ClientEngine(FakeEngine):
    """See `fp8refit.driver.engine.Engine`."""

    def __init__(self, candidate: Client) -> None:
        self._model = candidate
        self.ranks = candidate.ranks

    @classmethod
    def accepts(cls, candidate: object) -> bool:
        return isinstance(candidate, Client)


class ClientEntryPoint:
    """Entry point of `ClientEngine`."""

    name = "fake"

    def load(self) -> type[ClientEngine]:
        return ClientEngine


class Drivers:
    """A driver beside every rank."""

    def __init__(self, cluster: Cluster, **options: object) -> None:
        self.cluster = cluster
        self.clients = [Client(LocalRanks(rank)) for rank in cluster.ranks]
        self.refitters = [Refitter(client, **options) for client in self.clients]

    def refit(self, *arguments: dict[str, Any]) -> list[Any]:
        """Refit on every rank at once, with the arguments of each; what each returned or raised."""
        return self._call("refit", arguments)

    def calibrate(self, *arguments: dict[str, Any]) -> list[Any]:
        """Calibrate on every rank at once, as `refit` does."""
        return self._call("calibrate", arguments)

    def _call(self, method: str, arguments: tuple[dict[str, Any], ...]) -> list[Any]:
        given = arguments if len(arguments) > 1 else arguments * len(self.refitters)
        calls = [
            partial(getattr(refitter, method), **each) for refitter, each in zip(self.refitters, given, strict=True)
        ]
        return together(calls)


class ThreadChannel:
    """See `fp8refit.remote.protocol.channel.Channel`: every server in a thread."""

    num_at_once = num_ahead = 1
    serves_meanwhile = False

    def __init__(self, servers: Sequence[RankServer], *, suspends: bool = False) -> None:
        self.servers = list(servers)
        self.is_asynchronous = suspends
        self.requests: list[Request] = []
        self.timeouts_s: list[float] = []
        self.on_request: Callable[[Request], object] = lambda request: None
        self.on_answers: Callable[[list[str]], Sequence[str]] = lambda answers: answers
        self._line = ThreadPoolExecutor(1, thread_name_prefix="channel")

    @property
    def steps(self) -> list[str]:
        return [request.order.step for request in self.requests]

    async def send(self, messages: Sequence[str], timeouts_s: Sequence[float], *, begins: bool) -> Awaitable[Answers]:
        answers = self.exchange(messages, timeouts_s)
        if not begins:
            return answers
        return asyncio.ensure_future(answers) if self.is_asynchronous else InThread(answers)

    async def exchange(self, messages: Sequence[str], timeouts_s: Sequence[float]) -> Answers:
        (message,), (timeout_s,) = messages, timeouts_s
        return Answers(said=await self.call(message, timeout_s))

    async def call(self, message: str, timeout_s: float) -> Sequence[str]:
        request = Request.model_validate_json(message)
        self.requests.append(request)
        self.timeouts_s.append(timeout_s)
        self.on_request(request)
        if not self.is_asynchronous:
            return self.on_answers(self._handle(message))
        # What was sent arrives, and in order, whatever becomes of the sender.
        handled = asyncio.get_running_loop().run_in_executor(self._line, self._handle, message)
        return self.on_answers(await asyncio.shield(handled))

    def _handle(self, message: str) -> list[str]:
        return together([partial(server.handle, message) for server in self.servers])


class Remote:
    """One driver, and the ranks elsewhere."""

    def __init__(self, cluster: Cluster, *, suspends: bool = False, **options: object) -> None:
        self.cluster = cluster
        self.servers = [RankServer(lambda rank=rank: rank) for rank in cluster.ranks]
        self.channel = ThreadChannel(self.servers, suspends=suspends)
        self.ranks = RemoteRanks(self.channel)
        self.client = Client(self.ranks)
        self.refitter = Refitter(self.client, **options)


def manifest_of(policy: dict[str, Tensor]) -> dict[str, TensorMeta]:
    return {name: TensorMeta.of(tensor) for name, tensor in policy.items()}


def as_mapping(policy: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    return {"state_dict": policy}


def as_function(policy: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    return {"state_dict": lambda: iter(policy.items())}


def as_announced_iterator(policy: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    return {"state_dict": iter(policy.items()), "manifest": manifest_of(policy)}


def as_files(policy: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    save_file(policy, folder / "weights.safetensors")
    return {"state_dict": folder}


def as_iterator(policy: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    return {"state_dict": iter(policy.items())}


STATE_DICTS = [as_mapping, as_function, as_announced_iterator, as_files, as_iterator]
"""Every kind of source, as arguments of `Refitter.refit`."""


def fail_once(owner: object, method: str, error: BaseException, *, after: bool = False) -> None:
    """Let the next call of a method raise: at once, or when all of it is done."""
    original = getattr(owner, method)

    def failing(*args: Any, **kwargs: Any) -> Any:
        delattr(owner, method)
        if after:
            original(*args, **kwargs)
        raise error

    setattr(owner, method, failing)


FAULTS = {
    "ready": ("target", "check_ready", False),
    "judged": ("target", "_check_kept", False),
    "prepared": ("target", "prepare", True),
    "begun": ("write", "begin", False),
    "filled": ("write", "begin", True),
    "finished": ("write", "finish", False),
    "written": ("target", "finish", True),
}
"""Where a rank may fail: in which method of its target, live model or next write, and whether when it is done."""

WRITES_NOTHING = ("ready", "judged", "prepared")


KV_FAULTS = {
    "kv judged": ("live", "require_kv", False),
    "kv measured": ("live", "measure_kv", True),
    "kv written": ("target", "write_kv", True),
}
"""The same for KV scales."""

WRITES_NO_SCALE = ("ready", "kv judged", "kv measured")

_BAD_WRITES: WeakKeyDictionary[LiveModel, Callable[[Write], None]] = WeakKeyDictionary()
"""What becomes of the next write into a live model."""


def arm(target: Target, fault: str, error: BaseException) -> None:
    """Let the next refit or calibration of one rank fail."""
    place, method, after = (FAULTS | KV_FAULTS)[fault]
    if place == "write":
        _BAD_WRITES[target.live] = lambda write: fail_once(write, method, error, after=after)
        fp8refit.ranks.target.Write = _make_write
    else:
        fail_once(target if place == "target" else target.live, method, error, after=after)


def _make_write(prepared: Prepared, live: LiveModel) -> Write:
    write = Write(prepared, live)
    _BAD_WRITES.pop(live, lambda _: None)(write)
    return write
