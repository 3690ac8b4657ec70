"""SGLang's control plane as its adapter meets it: a tokenizer manager, schedulers in threads, and what is imported of it.

Each fake does what SGLang 0.5.15, 0.5.17 and 0.5.23 do at the places that the adapter touches; real engines: tests/sglang.
"""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, ClassVar

import fastapi
import torch
from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse
from fp8refit_sglang import SglangEngine, plugin
from fp8refit_sglang.compat import IN_SCHEDULER, IN_SERVER, IN_START, NEEDED
from torch import Tensor, nn

from fp8refit.live.seams import found
from tests.adapters.fake_modules import names_in, put_modules
from tests.fake_ranks import HIDDEN, K_PROJ, LAYOUTS, SHAPES, Meeting, Shard, ThreadGroup, whole
from tests.fakes import assert_slots_hold, live_bytes
from tests.loopback_server import LoopbackServer

NAMES = [name for name, _, _ in LAYOUTS["tensor"][0]]


# What the adapter imports.


@dataclass
class UpdateWeightsFromIPCReqInput:
    zmq_handles: dict[str, str]
    flush_cache: bool = True


@dataclass
class UpdateWeightsFromIPCReqOutput:
    success: bool
    message: str


@dataclass
class PauseGenerationReqInput:
    mode: str = "abort"


@dataclass
class ContinueGenerationReqInput:
    torch_empty_cache: bool = True


@dataclass
class UpdateWeightVersionReqInput:
    new_version: str
    abort_all_requests: bool = True


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    _hooks: ClassVar[dict[str, list[tuple]]] = {}
    _patched: ClassVar[set[str]] = set()

    @classmethod
    def register(cls, target: str, hook: Callable, hook_type: HookType) -> None:
        cls._hooks.setdefault(target, []).append((hook_type, hook, None))

    @classmethod
    def apply_hooks(cls) -> None:
        cls._patched.update(cls._hooks)

    @classmethod
    def call(cls, target: str, original: Callable, *args: Any) -> Any:
        """Call what replaces `target`."""
        if target not in cls._patched:
            return original(*args)
        ((_, hook, _),) = cls._hooks[target]
        return hook(original, *args)


class ForwardMode(Enum):
    EXTEND = "extend"


@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    input_ids: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    seq_lens_sum: int
    positions: Tensor | None = None


@dataclass(frozen=True)
class ForwardContext:
    attn_backend: object
    current: ClassVar["list[ForwardContext]"] = []


@contextlib.contextmanager
def forward_context(context: ForwardContext):
    ForwardContext.current.append(context)
    try:
        yield
    finally:
        ForwardContext.current.pop()


class Graphs:
    """Which CUDA graphs there are, by phase."""

    backends: ClassVar[dict[str, str]] = {}

    @classmethod
    def check(cls, phase: str, backend: str) -> bool:
        return cls.backends[phase] == backend


class BaseKVCacheMethod:
    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config

    def create_weights(self, layer: nn.Module) -> None:
        layer.k_scale, layer.v_scale = (nn.Parameter(torch.tensor(-1.0), requires_grad=False) for _ in range(2))


class EntryPoint:
    """Entry point of the adapter."""

    name = "sglang"

    def load(self) -> type[SglangEngine]:
        return SglangEngine


REQUESTS = (
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromIPCReqOutput,
    PauseGenerationReqInput,
    ContinueGenerationReqInput,
    UpdateWeightVersionReqInput,
)


def install(monkeypatch) -> None:
    """Put the fakes where the adapter imports SGLang from, and have them load the plugin."""
    contents = {
        "sglang": {"__version__": "0.5.fake"},
        "sglang.srt": {},
        "sglang.srt.managers": {},
        "sglang.srt.managers.io_struct": {kind.__name__: kind for kind in REQUESTS},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.model_executor": {},
        "sglang.srt.model_executor.cuda_graph_config": {"check_cuda_graph_backend": Graphs.check},
        "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": ForwardBatch, "ForwardMode": ForwardMode},
        "sglang.srt.model_executor.forward_context": {
            "ForwardContext": ForwardContext,
            "forward_context": forward_context,
        },
        "sglang.srt.layers": {},
        "sglang.srt.layers.quantization": {},
        "sglang.srt.layers.quantization.kv_cache": {"BaseKVCacheMethod": BaseKVCacheMethod},
        "sglang.srt.entrypoints": {},
        "sglang.srt.entrypoints.http_server": {"app": None},
    }
    modules = put_modules(monkeypatch, names_in(NEEDED))
    for name, members in contents.items():
        module = modules.get(name) or ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(HookRegistry, "_hooks", {})
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(Graphs, "backends", {"decode": "full", "prefill": "tc_piecewise"})
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [EntryPoint()])
    monkeypatch.setattr("fp8refit_sglang.worker.ProcessGroupExchange", lambda group: group)
    monkeypatch.setattr("fp8refit_sglang.worker.twin_of", lambda *_, **__: None)
    monkeypatch.setattr("fp8refit_sglang.worker.inventory_of", lambda network, *_, **__: network.read_inventory())
    plugin.register()
    HookRegistry.apply_hooks()


# Ranks.


HEAD_DIM = 64
NUM_KV_HEADS = 2
VOCAB_SIZE = 16


class RadixAttention(nn.Module):
    """An attention layer over an FP8 KV cache, with what a dummy boot leaves in its scales."""

    def __init__(self, num_kv_heads: int) -> None:
        super().__init__()
        self.k_scale, self.v_scale = (nn.Parameter(torch.tensor(0.25), requires_grad=False) for _ in range(2))
        self.k_scale_float = self.v_scale_float = 0.25
        self.quant_method = object()
        self.tp_q_head_num, self.tp_k_head_num = 2 * num_kv_heads, num_kv_heads
        self.qk_head_dim = self.v_head_dim = HEAD_DIM
        self.scaling, self.logit_cap, self.logit_capping_method = HEAD_DIM**-0.5, 0.0, "tanh"
        self.sliding_window_size, self.attn_type, self.is_cross_attention = -1, "decoder", False
        self.pos_encoding_mode, self.xai_temperature_len, self.use_irope = "NONE", -1, False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, forward_batch: ForwardBatch) -> Tensor:
        raise AssertionError("reads and writes the KV cache")


class Decoder(nn.Module):
    """Two layers of attention whose keys are of the live weights, and whose values are twice the keys."""

    def __init__(self, make_keys: Callable[[Tensor], Tensor], num_kv_heads: int) -> None:
        super().__init__()
        self.make_keys = make_keys
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.self_attn = nn.Module()
            layer.self_attn.attn = RadixAttention(num_kv_heads)

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch) -> list[Tensor]:
        assert ForwardContext.current
        assert forward_batch.forward_mode is ForwardMode.EXTEND
        assert forward_batch.seq_lens.sum() == forward_batch.seq_lens_sum == len(input_ids) == len(positions)
        k = self.make_keys(input_ids)
        attentions = [layer.self_attn.attn for layer in self.layers]
        return [attn(k.repeat(1, 2), index * k, 2 * k, forward_batch) for index, attn in enumerate(attentions, 1)]


def embed(token_ids: Tensor) -> Tensor:
    """(N, HIDDEN)."""
    return torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(0))[token_ids]


class Network(Shard):
    """The model of one rank."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(LAYOUTS["tensor"][rank] if num_ranks > 1 else [whole(name) for name in NAMES])
        self._rank, self._num_kv_heads = rank, NUM_KV_HEADS // num_ranks
        self.model = Decoder(self._make_keys, self._num_kv_heads)

    @property
    def attention(self) -> RadixAttention:
        return self.model.layers[0].self_attn.attn

    def _make_keys(self, token_ids: Tensor) -> Tensor:
        """Those of this rank's heads."""
        slot = next(slot for slot in self.slots() if slot.name == K_PROJ)
        scale = slot.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :HIDDEN]
        heads = (embed(token_ids) @ (slot.weight.float() * scale).T).split(self._num_kv_heads * HEAD_DIM, dim=1)
        return heads[self._rank]


class WeightUpdater:
    """The part of a scheduler that takes weights."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self.scheduler = scheduler
        self.offload_tags: set[str] = set()

    def update_weights_from_ipc(self, request: UpdateWeightsFromIPCReqInput) -> UpdateWeightsFromIPCReqOutput:
        return HookRegistry.call(found(IN_SCHEDULER), type(self)._update_weights_from_ipc, self, request)

    def _update_weights_from_ipc(self, request: UpdateWeightsFromIPCReqInput) -> UpdateWeightsFromIPCReqOutput:
        return UpdateWeightsFromIPCReqOutput(success=False, message=f"no ZMQ socket in {sorted(request.zmq_handles)}")


class Scheduler:
    """The scheduler of one rank, in a thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        group = ThreadGroup(meeting, rank)
        self.network = Network(rank, group.size)
        self.runner = SimpleNamespace(
            model=self.network,
            model_config=None,
            load_config=None,
            kv_cache_dtype=torch.float8_e4m3fn,
            kv_cache_dtype_str="fp8_e4m3",
            prefill_attention_backend_str="fa3",
            decode_attention_backend_str="fa3",
            attn_backend=object(),
            use_mla_backend=False,
            weight_updater=SimpleNamespace(recapture_cuda_graph=lambda: self.events.append("captured")),
        )
        self.tp_worker = SimpleNamespace(model_runner=self.runner)
        self.tp_group = SimpleNamespace(cpu_group=group, rank_in_group=rank, world_size=group.size)
        self.server_args = SimpleNamespace(load_format="auto", speculative_token_map=None)
        self.model_config = SimpleNamespace(is_multimodal=False, vocab_size=VOCAB_SIZE, context_len=64)
        self.chunked_prefill_size, self.max_prefill_tokens = 32, 4096
        self.weight_updater = WeightUpdater(self)
        self.draft_worker, self.spec_algorithm = None, SimpleNamespace(name="NONE")
        self.waiting_queue: list[str] = []
        self.running: list[str] = []
        self.is_paused = False
        self.num_flushes_to_fail = 0
        self.events: list[str] = []
        self.thread = ThreadPoolExecutor(1)

    def flush_cache(self, *, empty_cache: bool) -> bool:
        assert not empty_cache
        is_idle = not self.running and not self.waiting_queue
        if self.num_flushes_to_fail or not is_idle:
            self.num_flushes_to_fail = max(0, self.num_flushes_to_fail - 1)
            return False
        self.events.append("flushed")
        return True


# The process that takes requests.


@dataclass
class Request:
    """One that runs until `TokenizerManager.finish` is called, if it is long."""

    rid: str
    is_long: bool = False


class State:
    """What the manager knows of a request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class UpdateLock:
    """Held by every request that is with the schedulers."""

    def __init__(self) -> None:
        self.num_readers = 0

    async def is_locked(self) -> bool:
        return self.num_readers > 0

    @contextlib.contextmanager
    def reader(self):
        self.num_readers += 1
        try:
            yield
        finally:
            self.num_readers -= 1


class TokenizerManager:
    """What every request goes through; of 0.5.15 and 0.5.17."""

    def __init__(self, schedulers: list[Scheduler], server_args: SimpleNamespace) -> None:
        self.schedulers, self.server_args = schedulers, server_args
        self.tokenizer = SimpleNamespace(encode=lambda text: [1, *map(int, text.split())])
        self.rid_to_state: dict[str, State] = {}
        self.model_update_lock = UpdateLock()
        self.is_pause = False
        self.is_pause_cond = asyncio.Condition()
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.weight_version = "default"
        self.is_asking = False
        self.may_dispatch = asyncio.Event()
        self.may_dispatch.set()

    def init_communicators(self, server_args: SimpleNamespace) -> None:
        HookRegistry.call(IN_START, lambda *_: None, self, server_args)

    def auto_create_handle_loop(self) -> None:
        if self.event_loop is None:
            self.event_loop = asyncio.get_running_loop()

    async def update_weights_from_ipc_communicator(self, request: Any) -> list[Any]:
        assert self.event_loop is asyncio.get_running_loop(), "nobody reads the answers"
        assert not self.is_asking, "after a call that was cancelled SGLang's communicator waits for ever"
        self.is_asking = True
        loop = asyncio.get_running_loop()
        calls = [
            loop.run_in_executor(scheduler.thread, scheduler.weight_updater.update_weights_from_ipc, request)
            for scheduler in self.schedulers
        ]
        results = await asyncio.gather(*calls)
        self.is_asking = False
        return results[:1]

    async def update_weights_from_ipc(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        return await HookRegistry.call(IN_SERVER, type(self)._update_weights_from_ipc, self, obj, request)

    async def _update_weights_from_ipc(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        self.auto_create_handle_loop()
        result = (await self.update_weights_from_ipc_communicator(obj))[0]
        return result.success, result.message

    async def generate_request(self, obj: Request, request: Any = None):
        self.auto_create_handle_loop()
        state = self.rid_to_state[obj.rid] = State(obj)
        try:
            async with self.is_pause_cond:
                await self.is_pause_cond.wait_for(lambda: not self.is_pause)
            with self.model_update_lock.reader():
                await self._validate_and_resolve_lora(obj)
                for scheduler in self.schedulers:
                    scheduler.waiting_queue.append(obj.rid)
                self._run()
                yield await state.outcome
        finally:
            self.rid_to_state.pop(obj.rid)

    async def _validate_and_resolve_lora(self, obj: Request) -> None:
        """Every request comes here."""

    async def pause_generation(self, obj: PauseGenerationReqInput) -> None:
        async with self.is_pause_cond:
            self.is_pause = True
            await self.may_dispatch.wait()
            assert obj.mode in ("retract", "in_place")
            for scheduler in self.schedulers:
                scheduler.is_paused = True
                if obj.mode == "retract":
                    scheduler.waiting_queue += scheduler.running
                    scheduler.running.clear()

    async def continue_generation(self, obj: ContinueGenerationReqInput) -> None:
        async with self.is_pause_cond:
            self.is_pause = False
            for scheduler in self.schedulers:
                scheduler.is_paused = False
            self._run()
            self.is_pause_cond.notify_all()

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        assert abort_all
        running = [] if self.schedulers[0].is_paused else self.schedulers[0].running  # until they run again
        for rid in [*running, *self.schedulers[0].waiting_queue]:
            self.finish(rid, "abort")

    def finish(self, rid: str, reason: str = "stop") -> None:
        for scheduler in self.schedulers:
            (scheduler.running if rid in scheduler.running else scheduler.waiting_queue).remove(rid)
        self.rid_to_state[rid].outcome.set_result(reason)

    def _run(self) -> None:
        if self.schedulers[0].is_paused:
            return
        for scheduler in self.schedulers:
            scheduler.running += scheduler.waiting_queue
            scheduler.waiting_queue.clear()
        for rid in list(self.schedulers[0].running):
            if not self.rid_to_state[rid].request.is_long:
                self.finish(rid)

    def _update_weight_version_if_provided(self, weight_version: str | None) -> None:
        self.weight_version = weight_version


class TokenizerManager23(TokenizerManager):
    """Of 0.5.23: every process is told the version."""

    async def update_weight_version(self, obj: UpdateWeightVersionReqInput) -> None:
        assert not obj.abort_all_requests
        for scheduler in self.schedulers:
            scheduler.events.append(f"version {obj.new_version}")
        self._update_weight_version_if_provided(obj.new_version)


class Engine:
    """An `sglang.Engine`."""

    __module__ = "sglang.srt.entrypoints.engine"

    def __init__(
        self, num_ranks: int = 1, manager: type[TokenizerManager] = TokenizerManager, **arguments: Any
    ) -> None:
        meeting = Meeting(num_ranks)
        self.schedulers = [Scheduler(meeting, rank) for rank in range(num_ranks)]
        self.server_args = SimpleNamespace(tp_size=num_ranks, **arguments)
        self.tokenizer_manager = manager(self.schedulers, self.server_args)
        self.loop = asyncio.new_event_loop()

    def generate(self, rid: str) -> str:
        return self.loop.run_until_complete(self.async_generate(rid))

    async def async_generate(self, rid: str, *, is_long: bool = False) -> str:
        outputs = [output async for output in self.tokenizer_manager.generate_request(Request(rid, is_long))]
        return outputs[0]

    def make_policy(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(SHAPES[name], generator=generator).to(torch.bfloat16) for name in NAMES}

    def live_bytes(self) -> list[dict[str, bytes]]:
        return [live_bytes(scheduler.network) for scheduler in self.schedulers]

    def assert_holds(self, policy: dict[str, Tensor]) -> None:
        for scheduler in self.schedulers:
            assert_slots_hold(scheduler.network.slots(), policy)

    def is_running(self) -> bool:
        """Whether requests are run: neither the manager nor a scheduler is paused."""
        return not self.tokenizer_manager.is_pause and not any(scheduler.is_paused for scheduler in self.schedulers)

    def hidden(self) -> set[str]:
        """Methods of the manager that an attribute of the instance hides."""
        return {name for name in vars(self.tokenizer_manager) if hasattr(type(self.tokenizer_manager), name)}

    def shutdown(self) -> None:
        for scheduler in self.schedulers:
            scheduler.thread.shutdown(wait=False)
        self.loop.close()


class HeldWrite:
    """Holds a refit in its last step, between the bytes and the vote; then lets it end, well or by `error`."""

    def __init__(self, engine: Engine) -> None:
        self._network = engine.schedulers[0].network
        self._is_reached, self._may_end = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._network.on_refresh = self._hold

    def _hold(self) -> None:
        self._is_reached.set()
        assert self._may_end.wait(20)
        if self._error is not None:
            raise self._error

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._is_reached.wait, 20)

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._network.on_refresh = lambda: None
        self._may_end.set()


# A server.


class Server(LoopbackServer):
    """An engine behind SGLang's two routes, with an event loop in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.manager = engine, engine.tokenizer_manager
        self.headers: list[dict[str, str]] = []
        self.info: Any = vars(engine.server_args)
        self.app = FastAPI()
        self.app.add_api_route("/server_info", self._tell, methods=["GET"])
        self.app.add_api_route("/update_weights_from_ipc", self._update, methods=["POST"])
        http_server = sys.modules["sglang.srt.entrypoints.http_server"]
        http_server.app = self.app
        self.manager.init_communicators(self.manager.server_args)
        http_server.app = None
        super().__init__(self._note)

    async def _tell(self) -> Any:
        return JSONResponse(self.info)

    async def _update(self, obj: Annotated[UpdateWeightsFromIPCReqInput, Body()], request: fastapi.Request) -> Any:
        success, message = await self.manager.update_weights_from_ipc(obj, request)
        return JSONResponse({"success": success, "message": message}, status_code=200 if success else 400)

    async def _note(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await self.app(scope, receive, send)
