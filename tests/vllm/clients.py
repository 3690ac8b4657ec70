"""Trainers' own clients of vLLM: how each boots its engine, and its own sending code, or ours where its wheel has none.

`run_client.py` runs one; `test_clients.py` says what must come of it. Nothing of a trainer or an engine is imported before a
client is made. What stands in for NCCL and CUDA IPC: `cpu_transfer.py`.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from tests.engines.clients import Pairs, attempt
from tests.serving import ask, free_port, option
from tests.tiny_models import VOCAB_SIZE
from tests.vllm.trainer_ranks import Engine, Ranks, Trainer

BUCKET_BYTES = 1 << 19
BUCKET_MB = 1
WAIT_S = 100
START_S = 300
"""Until a server is there, whose processes import an engine one after the other."""
NUM_TOKENS = 100
"""Of a request that a policy interrupts."""
SERVED = "policy"
"""The name of a served model."""


class VllmClient:
    """A trainer beside a `vllm.LLM`."""

    package: ClassVar[str]
    """What its wheel brings."""
    options: ClassVar[dict] = {}
    """What the engine is booted with."""
    environment: ClassVar[dict[str, str]] = {}
    tells: ClassVar[bool] = True
    outlives: ClassVar[bool] = True
    is_inside: ClassVar[bool] = False
    """Whether the engine is in the trainer's process."""

    def __init__(self, model: Path, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.llm = self.boot(model)
        self._see("prepare", type(self).__name__)
        self.connect()

    def boot(self, model: Path) -> Any:
        from engines import settings
        from vllm import LLM

        return LLM(**settings(model) | self.options, tensor_parallel_size=self.num_ranks)

    @classmethod
    def prepare(cls) -> None:
        """In every rank of a booted engine."""
        import cpu_transfer

        cpu_transfer.stand_for_gpus()  # again, after vLLM's stand-ins of its own
        cpu_transfer.allocate_on_host()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def connect(self) -> None:
        """As the trainer does before its first policy."""

    def push(self, pairs: Pairs) -> None:
        raise NotImplementedError

    def leave(self, pairs: Pairs) -> None:
        """A trainer whose calls have no end just stops calling."""
        self.push(pairs)
        self.connect()

    def look(self) -> dict[str, list]:
        reports = self.llm.collective_rpc("fp8refit_last_report")
        versions = [json.loads(report)["version"] for report in reports]
        return {"live": self._see("live_bytes"), "places": self._see("places"), "versions": versions}

    def generate(self) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)
        asked = {"prompt_token_ids": [(13 * i) % 200 for i in range(24)]}
        (output,) = self.llm.generate(asked, sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def echo(self, said: str) -> list[str]:
        return self._see("echo", said)

    def _see(self, *what: str) -> list:
        answers = sorted(self.llm.collective_rpc("observe", args=what), key=lambda answer: answer["rank"])
        return [answer["found"] for answer in answers]


class Swift(VllmClient):
    """ms-swift's trainer mixin and its client, before the engine's side of its server."""

    package = "swift"
    options: ClassVar = {"worker_extension_cls": "swift.pipelines.infer.rollout.WeightSyncWorkerExtension"}
    environment: ClassVar = {"SWIFT_UPDATE_WEIGHTS_BUCKET_SIZE": str(BUCKET_MB)}
    tells = False  # its server answers before it calls the engine, and logs what fails there
    is_flat: ClassVar[bool] = True
    has_lora: ClassVar[bool] = False

    def connect(self) -> None:
        from swift.rlhf_trainers.vllm_client import VLLMClient

        self._server = SwiftServer(self.llm, self.num_ranks)
        client = VLLMClient.__new__(VLLMClient)
        client.base_urls, client.hosts, client.num_servers = ["http://engine"], ["127.0.0.1"], 1
        client.sessions, client.group_ports = [self._server], [free_port()]
        client.close_communicator()
        client.init_communicator(device="cpu")
        self._client = client

    def push(self, pairs: Pairs) -> None:
        from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

        trainer = SimpleNamespace(
            vllm_mode="server",
            vllm_client=self._client,
            rollout_enable_lora=self.has_lora,
            accelerator=SimpleNamespace(is_main_process=True),
            args=SimpleNamespace(enable_flattened_weight_sync=self.is_flat),
            _cached_vllm_param_names=None,
        )
        trainer._get_vllm_param_names_for_mapping = lambda: RolloutTrainerMixin._get_vllm_param_names_for_mapping(
            trainer
        )
        RolloutTrainerMixin._load_state_dict_to_vllm(trainer, dict(pairs))
        self._client.process_weights_after_loading()


class SwiftOneByOne(Swift):
    is_flat = False


class SwiftWithLora(Swift):
    """Names of weights inside of LoRA wrappers."""

    options = Swift.options | {"enable_lora": True, "max_lora_rank": 8}
    has_lora = True

    def look(self) -> dict[str, list]:
        """By the names that an engine without adapters has."""
        assert ".base_layer." in self._server.sent, "names are those inside of wrappers"
        found = super().look()
        bare = [{name.replace(".base_layer", ""): value for name, value in rank.items()} for rank in found["live"]]
        return found | {"live": bare}


class SwiftServer:
    """In place of HTTP: the routes of ms-swift's server, whose worker does one call after another."""

    def __init__(self, llm: Any, num_ranks: int) -> None:
        self._llm, self._num_ranks = llm, num_ranks
        self._calls = ThreadPoolExecutor(max_workers=1)
        self.sent = ""
        """All that it was told."""

    def get(self, url: str) -> Any:
        if "get_model_state_keys" in url:
            return _answer(keys=self._calls.submit(self._llm.collective_rpc, "get_state_keys").result()[0])
        return _answer(world_size=self._num_ranks)

    def post(self, url: str, json: dict | None = None) -> Any:
        method = url.strip("/").rpartition("/")[2]
        self.sent += str(json)
        fired = self._calls.submit(self._llm.collective_rpc, method, args=tuple((json or {}).values()))
        if method in ("process_weights_after_loading", "close_communicator"):
            fired.exception(WAIT_S)  # logged there, and answered with success
        return _answer()


def _answer(**found: Any) -> Any:
    return SimpleNamespace(status_code=200, json=lambda: found)


class SwiftRollout(Swift):
    """ms-swift's trainer mixin and its client, over HTTP to `swift rollout`."""

    server_options: ClassVar[tuple[str, ...]] = ()

    def boot(self, model: Path) -> Any:
        from tokens import tokenizer_of_bytes

        tokenizer_of_bytes().save_pretrained(model)
        options = {
            "model": model,
            "model_type": "qwen2",
            "template": "qwen",
            "torch_dtype": "bfloat16",
            "vllm_tensor_parallel_size": self.num_ranks,
            "vllm_max_model_len": 512,
            "vllm_max_num_seqs": 4,
            "vllm_enforce_eager": "true",
            "vllm_gpu_memory_utilization": 0.4,
            "vllm_engine_kwargs": json.dumps({"num_gpu_blocks_override": 64}),
        }
        arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        script = Path(__file__).with_name("swift_rollout.py")
        return TrainersServer([script, self.num_ranks, *arguments, *self.server_options], model.parent / "rollout.log")

    def connect(self) -> None:
        from swift.rlhf_trainers.vllm_client import VLLMClient

        if hasattr(self, "_client"):
            self._client.close_communicator()
        self._client = VLLMClient(base_urls=[self.llm.url], group_ports=free_port())
        self._client.init_communicator(device="cpu")

    def push(self, pairs: Pairs) -> None:
        super().push(pairs)
        self._client.reset_prefix_cache()

    def generate(self) -> list[int]:
        """Of what fails, the server writes why to its log."""
        from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest

        start = self.llm.log.stat().st_size
        request = RolloutInferRequest(messages=[{"role": "user", "content": "Why is the sky blue?"}])
        try:
            (output,) = self._client.infer([request], RequestConfig(max_tokens=4, temperature=0, return_details=True))
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self.llm.log.read_bytes()[start:].decode()}") from error
        return list(output.response.choices[0].token_ids)

    def close(self) -> None:
        """`run_client.py` ends the server."""


class SwiftRolloutOneByOne(SwiftRollout):
    is_flat = False


class SwiftRolloutAsynchronous(SwiftRollout):
    """With an engine for multi-turn rollouts."""

    server_options = ("--vllm_use_async_engine", "true")


class TrainersServer:
    """In place of an `LLM`: a trainer's own server in a process of its own, which has vLLM's route `collective_rpc`.

    Args:
        command: For Python. Gets `--host` and `--port`.
        log: What the server writes.
    """

    def __init__(self, command: Sequence[Any], log: Path) -> None:
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        arguments = [sys.executable, *command, "--host", "127.0.0.1", "--port", port]
        with log.open("w") as output:
            process = subprocess.Popen(list(map(str, arguments)), stdout=output, stderr=subprocess.STDOUT)
        deadline_s = time.monotonic() + START_S
        while ask(f"{self.url}/health")[0] != 200:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the server does not start\n{log.read_text()[-6000:]}")
            time.sleep(0.2)

    def collective_rpc(self, method: str, args: tuple = ()) -> list:
        status, said = ask(f"{self.url}/collective_rpc", json.dumps({"method": method, "args": args}))
        if status != 200:
            raise RuntimeError(f"{method}: {status} {said}")
        return said["results"]


class SwiftColocated(VllmClient):
    """ms-swift's trainer with its engine in its own process."""

    package = "swift"
    is_inside = True

    def push(self, pairs: Pairs) -> None:
        from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin
        from swift.rlhf_trainers.utils import finish_vllm_weight_reload

        network = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        trainer = SimpleNamespace(
            vllm_mode="colocate", rollout_enable_lora=False, engine=SimpleNamespace(inner_model=network)
        )
        RolloutTrainerMixin._load_state_dict_to_vllm(trainer, dict(pairs))
        config = self.llm.llm_engine.model_config
        finish_vllm_weight_reload(network, model_config=config, target_device=torch.device("cpu"))


class RankedClient(VllmClient):
    """A trainer whose ranks are processes."""

    trainer: ClassVar[type[Trainer]]
    ranks: Ranks | None = None

    @property
    def num_trainers(self) -> int:
        return self.num_ranks

    def connect(self) -> None:
        if self.ranks is not None:
            self.ranks.kill()
        name = f"{__name__}:{self.trainer.__name__}"
        self.ranks = Ranks(name, self.num_trainers, self.num_ranks, self.serve)

    def serve(self, method: str, *arguments: Any, **options: Any) -> Any:
        """A call of the trainer's."""
        return self.llm.collective_rpc(method, args=arguments, kwargs=options)

    def push(self, pairs: Pairs) -> None:
        if self.ranks.are_gone:
            self.connect()
        self.ranks.push(pairs)

    def leave(self, pairs: Pairs) -> None:
        if self.ranks.are_gone:
            self.connect()
        self.ranks.push(pairs, dies=True)
        self.connect()

    def close(self) -> None:
        self.ranks.kill()
        super().close()


class OpenRlhfTrainer(Trainer):
    """OpenRLHF's actor, of which all but the sending of weights is left out, and so is DeepSpeed."""

    is_ipc = False
    calls_for_each = True

    def __init__(self, rank: int, num_ranks: int, engine: Engine) -> None:
        super().__init__(rank, num_ranks, engine)
        from absent import stand_for

        stand_for("deepspeed", "flash_attn")
        from openrlhf.trainer.ray import ppo_actor

        torch.distributed.init_process_group("gloo")
        ppo_actor.deepspeed.zero = SimpleNamespace(GatheredParameters=lambda *_, **__: nullcontext())
        services = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        ppo_actor.ray = SimpleNamespace(
            get=lambda refs: [ref.result() for ref in refs], _private=SimpleNamespace(services=services)
        )
        self._actor = actor = ppo_actor.ActorPPOTrainer.__new__(ppo_actor.ActorPPOTrainer)
        vllm = SimpleNamespace(num_engines=1, tensor_parallel_size=num_ranks, enable_prefix_caching=True)
        deepspeed = SimpleNamespace(zero_stage=2, tensor_parallel_size=1)
        actor.strategy = SimpleNamespace(args=SimpleNamespace(vllm=vllm, ds=deepspeed))
        actor.vllm_engines, actor.use_cuda_ipc = [RayHandle(engine)], self.is_ipc
        if not self.is_ipc and rank == 0:
            actor._init_vllm_sync_group("nccl")

    def push(self, pairs: Iterator[tuple[str, torch.Tensor]], described: list) -> None:
        named = ((name, torch.nn.Parameter(tensor)) for name, tensor in pairs)
        self._actor.actor = SimpleNamespace(
            model=SimpleNamespace(module=SimpleNamespace(named_parameters=lambda: named))
        )
        self._actor.broadcast_to_vllm()


class OpenRlhfIpcTrainer(OpenRlhfTrainer):
    is_ipc = True


class RayHandle:
    """In place of the handle of OpenRLHF's actor, in a rank of the trainer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **options: self._engine.fire(method, *args, **options))


class OpenRlhf(RankedClient):
    """By broadcast, from the first rank of the trainer.

    The engine is in OpenRLHF's own actor of Ray, and if it has several ranks, each is an actor too. The trainer's calls come
    to it through this process.
    """

    package = "openrlhf"
    environment: ClassVar = {"FP8REFIT_TEST_RAY": "GPU", "RAY_USAGE_STATS_ENABLED": "0"}
    trainer = OpenRlhfTrainer
    num_trainers = 1

    def boot(self, model: Path) -> Any:
        import ray
        from absent import stand_for
        from tokens import tokenizer_of_bytes

        stand_for("deepspeed", "flash_attn")
        from openrlhf.trainer.ray import vllm_engine

        class Seen(vllm_engine.RolloutRayActor.__ray_metadata__.modified_class):
            async def collective_rpc(self, method: str, args: tuple) -> list:
                return await self.llm.collective_rpc(method, args=args)

        tokenizer_of_bytes().save_pretrained(model)
        ray.init(num_cpus=4, num_gpus=self.num_ranks, include_dashboard=False)
        vllm_engine.RolloutRayActor = ray.remote(Seen)
        (actor,) = vllm_engine.create_vllm_engines(
            1,
            self.num_ranks,
            str(model),
            seed=0,
            full_determinism=False,
            enable_prefix_caching=True,
            enforce_eager=True,
            max_model_len=512,
            gpu_memory_utilization=0.4,
        )
        return ActorOfRay(actor)

    def serve(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self.llm.call(method, *arguments, **options)

    def close(self) -> None:
        import ray

        self.ranks.kill()
        ray.shutdown()


class OpenRlhfIpc(OpenRlhf):
    """By CUDA IPC, every rank of the trainer beside one of the engine."""

    trainer = OpenRlhfIpcTrainer
    num_trainers = RankedClient.num_trainers


class ActorOfRay:
    """In place of an `LLM`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        import ray

        return ray.get(getattr(self.actor, method).remote(*arguments, **options), timeout=WAIT_S)

    def collective_rpc(self, method: str, args: tuple = ()) -> list:
        return self.call("collective_rpc", method, args)

    def generate(self, asked: dict, sampling: Any, **_: Any) -> list:
        return [self.call("generate", asked["prompt_token_ids"], sampling)]


class OpenRlhfAsynchronous(OpenRlhf):
    """OpenRLHF's asynchronous mode with partial rollouts: a request is paused for each policy, and goes on with it."""

    _under_way: Any = None

    def connect(self) -> None:
        super().connect()
        from openrlhf.trainer.ppo_trainer_async import TrainingActor, VLLMLock

        kind = TrainingActor.__ray_metadata__.modified_class
        self._trainer = kind.__new__(kind)
        self._trainer.args = SimpleNamespace(vllm=SimpleNamespace(enable_sleep=False))
        self._trainer.vllm_engines, self._trainer.vllm_lock = [self.llm.actor], VLLMLock.remote()
        self._trainer._partial_rollout = True

    def push(self, pairs: Pairs) -> None:
        self._interrupt(partial(super().push, pairs))

    def leave(self, pairs: Pairs) -> None:
        self._interrupt(partial(super().leave, pairs))

    def generate(self) -> list[int]:
        """Not before the request is answered that the last policy interrupted."""
        import ray

        asked, self._under_way = self._under_way, None
        if asked is not None:
            answer = ray.get(asked, timeout=WAIT_S)
            assert len(answer.outputs[0].token_ids) == NUM_TOKENS
        return super().generate()

    def _interrupt(self, send: Callable[[], None]) -> None:
        import ray
        from vllm import SamplingParams

        def is_answered(asked: Any) -> bool:
            return bool(ray.wait([asked], timeout=0)[0])

        def broadcast(method_name: str) -> list:
            """While generation is paused."""
            assert method_name == "broadcast_to_vllm"
            if is_answered(asked):
                refused = attempt(lambda: ray.get(asked))["error"]
                assert "refuses requests" in refused, "nothing is interrupted"
                self._under_way = None
            send()
            return []

        if self._under_way is not None:
            assert ray.wait([self._under_way], timeout=WAIT_S)[0], "a request waits without end"
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
        self._under_way = asked = self.llm.actor.generate.remote([7] * 24, sampling)
        while not is_answered(asked) and not self.llm.call("get_num_unfinished_requests"):
            time.sleep(0.01)
        self._trainer.actor_model_group = SimpleNamespace(async_run_method=broadcast)
        self._trainer.broadcast_to_vllm()


class SkyRlTrainer(Trainer):
    """SkyRL's strategies and its client, whose HTTP is left out."""

    strategy = "nccl"

    def __init__(self, rank: int, num_ranks: int, engine: Engine) -> None:
        super().__init__(rank, num_ranks, engine)
        from skyrl.backends.skyrl_train.weight_sync import WeightChunk

        torch.distributed.init_process_group("gloo")
        self._chunk = WeightChunk
        self.connect()

    def connect(self) -> None:
        from skyrl.backends.skyrl_train import weight_sync
        from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

        engine = self.engine

        class Client(RemoteInferenceClient):
            async def _call_all_servers(self, endpoint: str, json: Any = None, *_: Any) -> dict:
                found = await asyncio.to_thread(engine.call, json["method"], **json.get("kwargs", {}))
                return {"http://engine": {"status": 200, "body": {"results": found}}}

        client = Client.__new__(Client)
        config = SimpleNamespace(model_dtype="bfloat16", run_engines_locally=True)
        kind = weight_sync.get_transfer_strategy_cls("nccl", self.strategy == "ipc")
        if self.strategy == "ipc":
            info = kind.create_init_info(config)
        else:
            info = weight_sync.BroadcastInitInfo(
                master_addr="127.0.0.1",
                master_port=free_port(),
                rank_offset=1,
                world_size=self.num_ranks + 1,
                override_existing_receiver=False,
            )
            joined = engine.fire("init_weight_transfer_engine", info.to_api_payload()) if self.rank == 0 else None
        self._sender = kind.create_sender(info, client)
        if self.strategy != "ipc" and joined is not None:
            joined.result()

    def push(self, pairs: Iterator[tuple[str, torch.Tensor]], described: list) -> None:
        names, dtypes, shapes = map(list, zip(*described, strict=True))
        dtypes = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        metadata = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        asyncio.run(self._send(self._chunks(pairs), metadata))

    async def _send(self, chunks: Iterator, metadata: dict[str, list]) -> None:
        await self._sender.send_chunks(chunks, metadata)

    def _chunks(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator:
        """Of a few tensors, as `WeightExtractor`s of SkyRL's give them."""
        for _, some in groupby(enumerate(pairs), lambda numbered: numbered[0] // 4):
            names, tensors = zip(*(pair for _, pair in some), strict=True)
            yield self._chunk(
                names=list(names),
                dtypes=[str(tensor.dtype) for tensor in tensors],
                shapes=[list(tensor.shape) for tensor in tensors],
                tensors=list(tensors),
            )


class SkyRlIpcTrainer(SkyRlTrainer):
    strategy = "ipc"
    calls_for_each = True


class SkyRlHttpTrainer(SkyRlTrainer):
    """SkyRL's FSDP worker, of which all but the sending of weights is left out, and its client, over HTTP."""

    colocates = False

    def connect(self) -> None:
        self._client, config = skyrl_client(self.engine.call("url"))
        from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase

        config.trainer.placement.colocate_all = self.colocates
        self._worker = worker = FSDPPolicyWorkerBase.__new__(FSDPPolicyWorkerBase)
        worker.cfg, worker.model = config.trainer, SimpleNamespace(model=None)
        worker._is_lora = worker._is_multimodal_lm_only = False
        self._engine_config = config.generator.inference_engine
        asyncio.run(worker.init_weight_sync_state(self._client, self._engine_config))

    async def _send(self, chunks: Iterator, metadata: dict[str, list]) -> None:
        self._worker.weight_extractor = SimpleNamespace(
            extract_weights=lambda _: chunks, get_weight_metadata=lambda _: metadata
        )
        await self._worker.broadcast_to_inference_engines(self._client, self._engine_config)


class SkyRlHttpIpcTrainer(SkyRlHttpTrainer):
    colocates = True


def skyrl_client(url: str) -> tuple[Any, Any]:
    """SkyRL's client of a server that runs already, and its configuration."""
    from absent import stand_for

    stand_for("flash_attn", "vllm_router")
    from skyrl.backends.skyrl_train.inference_servers.setup import build_new_inference_client
    from skyrl.train.config import SkyRLTrainConfig

    config = SkyRLTrainConfig()
    config.generator.inference_engine.external_proxy_url = url
    config.generator.inference_engine.external_server_urls = [url]
    config.generator.inference_engine.served_model_name = SERVED
    client, _ = build_new_inference_client(config, None)
    return client, config


class SkyRl(RankedClient):
    """By vLLM's weight transfer, from the first rank of the trainer."""

    package = "skyrl"
    options: ClassVar = {
        "worker_extension_cls": "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap.NewInferenceWorkerWrap",
        "weight_transfer_config": {"backend": "nccl"},
    }
    trainer = SkyRlTrainer
    num_trainers = 1

    def leave(self, pairs: Pairs) -> None:
        """A worker that waits for an end of an update takes no other one: the next trainer must end it first."""
        self.ranks.push(pairs, dies=True)
        with suppress(Exception):  # it is not whole
            self.llm.collective_rpc("skyrl_finish_weight_update")
        self.connect()

    def serve(self, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "init_weight_transfer_engine":
            return self.llm.collective_rpc(method, args=arguments)
        return super().serve(method, *arguments, **options)


class SkyRlIpc(SkyRl):
    """By CUDA IPC, every rank of the trainer beside one of the engine."""

    options: ClassVar = SkyRl.options | {"weight_transfer_config": {"backend": "ipc"}}
    trainer = SkyRlIpcTrainer
    num_trainers = RankedClient.num_trainers


SKYRL_SERVER = """
import runpy, typing, typing_extensions
typing.TypedDict = typing_extensions.TypedDict  # see `cpu_transfer.install`
runpy.run_module("skyrl.backends.skyrl_train.inference_servers.vllm_server_actor", run_name="__main__")
"""


class SkyRlHttp(SkyRl):
    """SkyRL's server, started as its users start one elsewhere, and its dispatcher of the trainer's ranks."""

    trainer = SkyRlHttpTrainer

    def boot(self, model: Path) -> Any:
        from engines import settings
        from tokens import tokenizer_of_bytes

        tokenizer_of_bytes().save_pretrained(model)
        asked = settings(model) | self.options | {"served_model_name": SERVED, "tensor_parallel_size": self.num_ranks}
        asked["weight_transfer_config"] = json.dumps(asked["weight_transfer_config"])
        del asked["skip_tokenizer_init"]
        arguments = [part for name, value in asked.items() for part in option(name, value)]
        return TrainersServer(["-c", SKYRL_SERVER, *arguments], model.parent / "skyrl.log")

    def connect(self) -> None:
        super().connect()
        client, config = skyrl_client(self.llm.url)
        from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch

        self._dispatch = dispatch = WorkerDispatch.__new__(WorkerDispatch)
        dispatch.cfg, dispatch.colocate_all, dispatch._inference_engine_client = config, False, client

    def serve(self, method: str, *arguments: Any, **options: Any) -> Any:
        assert method == "url", "the trainer's own calls are HTTP"
        return self.llm.url

    def push(self, pairs: Pairs) -> None:
        self._dispatch._broadcast_to_inference_engines = lambda *_, **__: super(SkyRlHttp, self).push(pairs)
        asyncio.run(self._dispatch.save_weights_for_sampler())

    def generate(self) -> list[int]:
        asked = {
            "prompt_token_ids": [[(13 * i) % 200 for i in range(24)]],
            "sampling_params": {"max_tokens": 4, "temperature": 0, "ignore_eos": True},
        }
        answer = asyncio.run(self._dispatch._inference_engine_client.generate(asked))
        return list(answer["response_ids"][0])

    def close(self) -> None:
        """`run_client.py` ends the server."""
        self.ranks.kill()


class SkyRlHttpIpc(SkyRlHttp):
    """By CUDA IPC, every rank of the trainer beside one of the engine."""

    options: ClassVar = SkyRlIpc.options
    trainer = SkyRlHttpIpcTrainer
    num_trainers = RankedClient.num_trainers


class VerlTrainer(Trainer):
    """verl's sender of buckets: every rank has one, and sends the whole state dict."""

    def push(self, pairs: Iterator[tuple[str, torch.Tensor]], described: list) -> None:
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

        job = os.environ["VERL_RAY_JOB_ID"]
        handle = f"ipc:///tmp/rl-colocate-zmq-{job}-replica-0-rank-{self.rank}.sock"
        sender = BucketedWeightSender(zmq_handle=handle, bucket_size_mb=BUCKET_MB, use_shm=True)
        called = self.engine.fire("update_weights_from_ipc", use_shm=True) if self.rank == 0 else None
        asyncio.run(sender.async_send_weights(pairs))
        if called is not None:
            called.result()


class Verl(RankedClient):
    """verl's extension of vLLM's workers."""

    package = "verl"
    options: ClassVar = {"worker_extension_cls": "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"}
    environment: ClassVar = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_platform"}
    trainer = VerlTrainer
    outlives = False

    def __init__(self, model: Path, num_ranks: int) -> None:
        os.environ["VERL_RAY_JOB_ID"] = str(os.getpid())
        super().__init__(model, num_ranks)
        self.llm.collective_rpc("monkey_patch_model", args=(VOCAB_SIZE,))


class CheckpointTrainer(Trainer):
    """checkpoint-engine's parameter server, of which every rank has a part of the checkpoint."""

    def __init__(self, rank: int, num_ranks: int, engine: Engine) -> None:
        super().__init__(rank, num_ranks, engine)
        os.environ["PS_MAX_BUCKET_SIZE_GB"] = str(BUCKET_BYTES / 2**30)
        from checkpoint_engine import ps

        stand_for_device_manager(num_ranks)
        self._server, self._number = ps.ParameterServer(auto_pg=True), 0

    def push(self, pairs: Iterator[tuple[str, torch.Tensor]], described: list) -> None:
        self._number += 1
        name, server = f"policy-{self._number}", self._server
        mine = {name: tensor for index, (name, tensor) in enumerate(pairs) if index % self.num_ranks == self.rank}
        errors: list[Exception] = []

        def request(paths: list[tuple[str, str]]) -> None:
            try:
                if self.rank == 0:
                    self.engine.call("update_weights_from_ipc", dict(paths))
            except RuntimeError as error:
                errors.append(error)  # else it ends in its thread

        server.register_checkpoint(name, named_tensors=mine)
        try:
            server.gather_metas(name)
            server.update(name, request)
        finally:
            server.unregister_checkpoint(name)
        if errors:
            raise errors[0]


def stand_for_device_manager(number: int) -> None:
    """checkpoint-engine's, which knows no CPU."""
    from checkpoint_engine.device_utils import DeviceManager

    DeviceManager._detect_device_type, DeviceManager.backend = lambda _: "cpu", "gloo"
    DeviceManager._setup_device_module = lambda manager: setattr(manager, "device_module", CpuDevice(number))


class CpuDevice:
    """In place of `torch.cuda`."""

    def __init__(self, number: int) -> None:
        self.device_count = lambda: number
        self.get_device_properties = torch.cuda.get_device_properties

    def __getattr__(self, name: str) -> Any:
        return lambda *_: (1 << 30, 1 << 30) if name == "mem_get_info" else 0


class CheckpointEngine(RankedClient):
    """checkpoint-engine's extension of vLLM's workers."""

    package = "checkpoint_engine"
    options: ClassVar = {"worker_extension_cls": "checkpoint_engine.worker.VllmColocateWorkerExtension"}
    trainer = CheckpointTrainer
    outlives = False

    @classmethod
    def prepare(cls) -> None:
        from checkpoint_engine.worker import VllmColocateWorkerExtension

        super().prepare()
        stand_for_device_manager(1)
        VllmColocateWorkerExtension._device_uuid = property(lambda _: f"GPU-{torch.cuda.get_device_properties().uuid}")


class NemoRl(VllmClient):
    """NeMo RL's worker calls, by IPC or a collective, end in `load_weights` of what the trainer has quantized."""

    package = "vllm"
    options: ClassVar = {"worker_extension_cls": "replayed.Replayed"}

    def push(self, pairs: Pairs) -> None:
        self._load(list(quantized(pairs)))

    def _load(self, pairs: Pairs) -> None:
        with NamedTemporaryFile(dir="/dev/shm") as file:
            torch.save([pairs[start : start + 4] for start in range(0, len(pairs), 4)], file)
            file.flush()
            self.llm.collective_rpc("load_file", args=(file.name,))


def quantized(pairs: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    """Codes and scales in the place of each weight of a projection."""
    from fp8refit import quantize_blockwise

    for name, tensor in pairs:
        if name.endswith("_proj.weight") and tensor.isfinite().all():
            codes, scales = quantize_blockwise(tensor, scale_format="fp32_floored")
            yield from ((name, codes), (f"{name}_scale_inv", scales))
        else:
            yield name, tensor


class PrimeRl(NemoRl):
    """prime-rl's three calls, with weights as they are."""

    def push(self, pairs: Pairs) -> None:
        self.llm.collective_rpc("pause_and_begin")
        self._load(pairs)
        self.llm.collective_rpc("end_and_resume")

    def leave(self, pairs: Pairs) -> None:
        self.llm.collective_rpc("pause_and_begin")
        self._load(pairs)


class Answered(NemoRl):
    """A trainer that waits for an answer to each bucket."""

    def push(self, pairs: Pairs) -> None:
        self._load(pairs)

    def _load(self, pairs: Pairs) -> None:
        buckets = [pairs[start : start + 4] for start in range(0, len(pairs), 4)]
        with NamedTemporaryFile(dir="/dev/shm") as file, NamedTemporaryFile("r") as answered:
            torch.save(buckets, file)
            file.flush()
            try:
                self.llm.collective_rpc("update_weights_from_ipc", args=(file.name, answered.name))
            finally:
                number = Path(answered.name).read_text()
                if number != str(len(buckets)):
                    raise KeyboardInterrupt(f"the trainer would wait without end: {number} of {len(buckets)} answers")


CLIENTS: dict[str, tuple[type[VllmClient], tuple[int, ...]]] = {
    "ms-swift flattened": (Swift, (1, 2)),
    "ms-swift one by one": (SwiftOneByOne, (1,)),
    "ms-swift LoRA": (SwiftWithLora, (1,)),
    "ms-swift colocated": (SwiftColocated, (1,)),
    "ms-swift rollout server": (SwiftRollout, (1, 2)),
    "ms-swift rollout server one by one": (SwiftRolloutOneByOne, (1,)),
    "ms-swift rollout server asynchronous": (SwiftRolloutAsynchronous, (1,)),
    "checkpoint-engine": (CheckpointEngine, (1, 2)),
    "verl": (Verl, (1, 2)),
    "OpenRLHF broadcast": (OpenRlhf, (1, 2)),
    "OpenRLHF CUDA IPC": (OpenRlhfIpc, (1, 2)),
    "OpenRLHF asynchronous": (OpenRlhfAsynchronous, (2,)),
    "NeMo RL": (NemoRl, (2,)),
    "each bucket answered": (Answered, (1,)),
    "prime-rl": (PrimeRl, (1,)),
    "SkyRL weight transfer": (SkyRl, (1, 2)),
    "SkyRL CUDA IPC": (SkyRlIpc, (1, 2)),
    "SkyRL HTTP": (SkyRlHttp, (1, 2)),
    "SkyRL HTTP, CUDA IPC": (SkyRlHttpIpc, (2,)),
}
"""By the trainer and its way: the client, and numbers of ranks."""
