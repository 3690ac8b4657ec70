"""Trainers' own clients of vLLM: how each boots its engine, and its own sending code, or ours where its wheel has none.

`run_client.py` runs one; `test_clients.py` says what must come of it. Nothing of a trainer or an engine is imported before a
client is made. What stands in for NCCL and CUDA IPC: `cpu_transfer.py`.
"""

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from tests.engines.clients import Pairs
from tests.serving import free_port

BUCKET_MB = 1
WAIT_S = 100


class VllmClient:
    """A trainer beside a `vllm.LLM`."""

    package: ClassVar[str]
    """What its wheel brings."""
    options: ClassVar[dict] = {}
    """What the engine is booted with."""
    environment: ClassVar[dict[str, str]] = {}
    tells: ClassVar[bool] = True
    is_inside: ClassVar[bool] = False
    """Whether the engine is in the trainer's process."""

    def __init__(self, llm: Any, num_ranks: int) -> None:
        self.llm, self.num_ranks = llm, num_ranks
        self.connect()

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


def beside(call: Callable[[], Any], send: Callable[[], Any]) -> None:
    """Call the engine, and send meanwhile. What the call raises counts."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        called: Future = pool.submit(call)
        try:
            send()
        finally:
            called.result(WAIT_S)


CLIENTS: dict[str, tuple[type[VllmClient], tuple[int, ...]]] = {
    "ms-swift flattened": (Swift, (1, 2)),
    "ms-swift one by one": (SwiftOneByOne, (1,)),
    "ms-swift LoRA": (SwiftWithLora, (1,)),
    "ms-swift colocated": (SwiftColocated, (1,)),
}
"""By the trainer and its way: the client, and numbers of ranks."""
