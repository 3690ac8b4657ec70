"""Trainers' clients of SGLang: their calls, in their order, as we rewrote them, and verl's own code from its wheel.

`run_client` runs one in its own process; `test_trainers_stubbed_kernels.py` says what must come of it. The calls are what a
server does with the trainers' HTTP requests: a field for each field of the JSON. Shared memory stands in for CUDA IPC, gloo for
NCCL.
"""

import asyncio
import inspect
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed
from drop_ins import HAS_SESSIONS
from engines import PROMPTS, SAMPLING, bf16_of, booted, booted_noise, look, make_policy
from sglang import Engine
from sglang.srt.managers import io_struct

from fp8refit import quantize_blockwise
from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.live.slots import SCALE_SUFFIX
from tests.engines.clients import FAMILY, SEEDS, Pairs, try_client
from tests.serving import free_port

BUCKET = 5
"""Tensors."""
REQUESTS = {
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "pause_generation": "PauseGenerationReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
}
"""What SGLang's server makes of a request's JSON."""


class SglangClient:
    """A trainer beside an `sglang.Engine`."""

    package: ClassVar[str] = "sglang"
    """What must be installed."""
    tells: ClassVar[bool] = True
    outlives: ClassVar[bool] = True

    def __init__(self, engine: Engine, num_ranks: int) -> None:
        self.engine, self.num_ranks, self.version = engine, num_ranks, 0
        self.connect()

    def connect(self) -> None:
        """As the trainer does before its first policy."""

    def post(self, route: str, **fields: Any) -> None:
        """A request of the trainer's. Raises where the server would answer 400."""
        self.run(self.answer(route, fields))

    def run(self, call: Any) -> Any:
        return self.engine.loop.run_until_complete(asyncio.wait_for(call, 60))

    async def answer(self, route: str, fields: dict) -> None:
        manager = self.engine.tokenizer_manager
        if route == "flush_cache":
            while not (
                await manager.flush_cache()
            ).success:  # they all ask again: a scheduler notices later that it is idle
                await asyncio.sleep(0.05)
            return
        call, kind = getattr(manager, route), getattr(io_struct, REQUESTS[route])
        request = (None,) if "request" in inspect.signature(call).parameters else ()
        answer = await call(kind(**fields), *request)
        if answer is not None and not answer[0]:
            raise RuntimeError(f"400 Bad Request: {answer[1]}")

    def push(self, pairs: Pairs) -> None:
        self.version += 1
        self.begin()
        for bucket in self.buckets(pairs):
            self.send(bucket)
        self.end()

    def leave(self, pairs: Pairs) -> None:
        self.begin()
        for bucket in self.buckets(pairs):
            self.send(bucket)
        self.connect()

    def begin(self) -> None: ...

    def send(self, bucket: Pairs) -> None:
        raise NotImplementedError

    def end(self) -> None: ...

    def buckets(self, pairs: Pairs) -> Iterator[Pairs]:
        yield from (pairs[start : start + BUCKET] for start in range(0, len(pairs), BUCKET))

    def look(self) -> dict[str, list]:
        versions = [report["version"] for report in look(self.engine, "last report")]
        return {"live": look(self.engine, "live_bytes"), "places": look(self.engine, "places"), "versions": versions}

    def generate(self) -> list[int]:
        if self.engine.tokenizer_manager.is_pause:  # by a trainer that failed; whoever goes on gets no half policy
            self.post("continue_generation")
        return self.engine.generate(input_ids=PROMPTS[0], sampling_params=SAMPLING)["output_ids"]

    def echo(self, said: str) -> list[str]:
        return look(self.engine, "echo", said)

    def send_flat(self, pairs: Pairs, **fields: Any) -> None:
        """A bucket in one tensor, an entry for each rank."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        bucket = FlattenedTensorBucket(named_tensors=pairs)
        flat = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        entries = [MultiprocessingSerializer.serialize(flat, output_str=True) for _ in range(self.num_ranks)]
        self.post(
            "update_weights_from_tensor",
            serialized_named_tensors=entries,
            load_format="flattened_bucket",
            flush_cache=False,
            weight_version=str(self.version),
            **fields,
        )


class Slime(SglangClient):
    """Colocated."""

    def begin(self) -> None:
        self.post("pause_generation")
        self.post("flush_cache")

    def send(self, bucket: Pairs) -> None:
        self.send_flat(bucket)

    def end(self) -> None:
        self.post("continue_generation")


class SlimeInStages(Slime):
    """Sources are pipeline stages, which take turns in an order that differs from policy to policy."""

    def buckets(self, pairs: Pairs) -> Iterator[Pairs]:
        last = "model.layers.1."
        stages = [[pair for pair in pairs if (last in pair[0]) is is_last] for is_last in (False, True)]
        waiting = [
            super(SlimeInStages, self).buckets(stage) for stage in (stages if self.version % 2 else stages[::-1])
        ]
        while waiting:
            turn = waiting.pop(0)
            if (bucket := next(turn, None)) is not None:
                yield bucket
                waiting.append(turn)


class SlimeDistributed(Slime):
    """Its engine elsewhere: a broadcast for each tensor, after a request that names them."""

    group_name: ClassVar[str] = "slime-pp_0"

    def connect(self) -> None:
        from sglang.srt.utils import init_custom_process_group

        self.version, self.name, port = 0, f"{self.group_name}-{free_port()}", free_port()
        size = 1 + self.num_ranks
        joining = threading.Thread(
            target=lambda: setattr(
                self,
                "group",
                init_custom_process_group(
                    backend="gloo",
                    init_method=f"tcp://127.0.0.1:{port}",
                    world_size=size,
                    rank=0,
                    group_name=self.name,
                ),
            )
        )
        joining.start()
        self.post(
            "init_weights_update_group",
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            world_size=size,
            group_name=self.name,
            backend="gloo",
        )
        joining.join()

    def send(self, bucket: Pairs, **fields: Any) -> None:
        sending = threading.Thread(target=self._broadcast, args=(bucket,))
        sending.start()
        try:
            self.post(
                "update_weights_from_distributed",
                names=[name for name, _ in bucket],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                shapes=[list(tensor.shape) for _, tensor in bucket],
                group_name=self.name,
                flush_cache=False,
                weight_version=str(self.version),
                **fields,
            )
        finally:
            sending.join()

    def _broadcast(self, bucket: Pairs) -> None:
        for _, tensor in bucket:
            torch.distributed.broadcast(tensor, 0, group=self.group)


class Miles(SglangClient):
    """Between begin and end, with a selector."""

    def begin(self) -> None:
        self.post("pause_generation", mode="retract")
        self.post("flush_cache")
        self.post("begin_weight_update", selector="all")

    def send(self, bucket: Pairs) -> None:
        self.send_flat(bucket, selector="all")

    def end(self) -> None:
        self.post("end_weight_update")
        self.post("continue_generation")


class MilesDistributed(Miles, SlimeDistributed):
    group_name = "miles-pp_0"

    def send(self, bucket: Pairs) -> None:
        SlimeDistributed.send(self, bucket, selector="all")


class NemoRl(SglangClient):
    """Buckets of one dtype each."""

    def begin(self) -> None:
        self.post("flush_cache")  # as it releases the engine's memory before a training step

    def send(self, bucket: Pairs) -> None:
        for dtype in dict.fromkeys(tensor.dtype for _, tensor in bucket):
            self.send_flat([(name, tensor) for name, tensor in bucket if tensor.dtype is dtype])

    def end(self) -> None:
        self.post("flush_cache")


class NemoRlPairs(NemoRl):
    """The trainer quantizes: codes and scales, which come in requests of their own."""

    def buckets(self, pairs: Pairs) -> Iterator[Pairs]:
        for bucket in super().buckets(pairs):
            yield [pair for name, tensor in bucket for pair in quantized(name, tensor)]


def quantized(name: str, tensor: torch.Tensor) -> Pairs:
    if "_proj." not in name or tensor.ndim != 2:
        return [(name, tensor)]
    codes, scales = quantize_blockwise(tensor)
    return [(name, codes), (name + SCALE_SUFFIX, scales)]


class Verl(SglangClient):
    """verl's rollout adapter and its HTTP adapter from its wheel, but for the connection."""

    package = "verl"

    def connect(self) -> None:
        from sglang.srt.utils import patch_torch
        from torch.distributed.device_mesh import init_device_mesh
        from verl.workers.rollout.sglang_rollout import sglang_rollout

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", world_size=1, rank=0
            )
        sglang_rollout._to_ipc_device = lambda tensor: tensor
        patch_torch.monkey_patch_torch_reductions = lambda: None  # of CUDA IPC
        self._class, http = sglang_rollout.ServerAdapter, sglang_rollout.AsyncHttpServerAdapter
        server = http.__new__(http)
        server.node_rank = 0
        server._make_async_request = lambda route, fields: self.answer(route, fields)
        server.flush_cache = lambda: self.answer("flush_cache", {})
        self._trainer = self._class.__new__(self._class)
        vars(self._trainer).update(
            _engine=server,
            _pd_role=None,
            config=VerlConfig(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1)),
            model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen2")),
            device_mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("infer_tp",)),
        )

        async def connected() -> None: ...

        self._trainer._init_server_adapter = connected

    def push(self, pairs: Pairs) -> None:
        self.post("flush_cache")  # as it releases the engine's memory before a training step
        self.run(self._class.update_weights(self._trainer, iter(pairs)))

    def leave(self, pairs: Pairs) -> None:
        self.push(pairs)


class VerlConfig(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


CLIENTS: dict[str, type[SglangClient]] = {
    "slime": Slime,
    "slime in stages": SlimeInStages,
    "slime distributed": SlimeDistributed,
    "miles": Miles,
    "miles distributed": MilesDistributed,
    "NeMo RL": NemoRl,
    "NeMo RL pairs": NemoRlPairs,
    "verl": Verl,
}


def run_client(client: str, num_ranks: int, work: Path) -> dict:
    if HAS_SESSIONS is not issubclass(CLIENTS[client], Miles):
        return {"why not": "this SGLang wants begin and end" if HAS_SESSIONS else "this SGLang has no begin and end"}
    os.environ["FP8REFIT_DROP_IN"] = "1"
    policies = [make_policy(FAMILY, seed) for seed in SEEDS]
    with booted_noise(FAMILY, work, num_ranks) as engine:
        return try_client(CLIENTS[client](engine, num_ranks), policies)


def run_client_fresh(num_ranks: int, work: Path) -> list:
    """What each rank of a fresh engine holds, for every policy."""
    found = []
    for seed in SEEDS:
        checkpoint = work / f"{FAMILY}-fp8-{seed}-of-{num_ranks}"
        quantize_checkpoint(bf16_of(FAMILY, seed, work), checkpoint)
        with booted(checkpoint, num_ranks) as engine:
            found.append(look(engine, "live_bytes"))
    return found
