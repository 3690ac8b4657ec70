"""SkyRL's own start of Ray and its actor of a vLLM server, unmodified: does the drop-in get into the engine?

`variables`: SkyRL starts Ray itself, and has the drop-in's variables. `configuration`: Ray runs already, without them, and
SkyRL's configuration switches the drop-in on. Writes what the engine's ranks answer.
"""

import json
import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # see `cpu_transfer.install`; the actor imports this module first

from skyrl.backends.skyrl_train.inference_servers.server_group import ServerGroup  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.utils.utils import initialize_ray  # noqa: E402
from tokens import tokenizer_of_bytes  # noqa: E402

from tests.serving import free_port  # noqa: E402


class Server(VLLMServerActor):
    """SkyRL's."""


def main(folder: Path, way: str) -> None:
    import ray

    model = folder / "policy-0"
    tokenizer_of_bytes().save_pretrained(model)
    config = SkyRLTrainConfig()
    config.trainer.policy.model.path, config.trainer.log_path = str(model), str(folder / "logs")
    config.trainer.placement.colocate_all = False  # it would put engines to sleep, which a CPU does not
    engine = config.generator.inference_engine
    engine.enforce_eager, engine.gpu_memory_utilization = True, 0.4
    engine.engine_init_kwargs = {"max_model_len": 512, "num_gpu_blocks_override": 64}
    if way == "configuration":
        engine.engine_init_kwargs |= {
            "quantization": "fp8_per_block",
            "additional_config": {"fp8refit": {"drop_in": True}},
        }
    with running_already() if way == "configuration" else own():
        initialize_ray(config)
        try:
            found = look_at_engine(config)
        finally:
            ray.shutdown()
    (folder / "found.json").write_text(json.dumps(found))


def look_at_engine(config: SkyRLTrainConfig) -> dict:
    group = ServerGroup(
        build_vllm_cli_args(config),
        1,
        start_port=free_port(),
        server_actor_cls=Server,
        distributed_executor_backend=config.generator.inference_engine.distributed_executor_backend,
        enable_ray_prometheus_stats=False,  # needs Ray's dashboard
    )
    (server,) = group.start()
    found = {name: call(server.url, "observe", name)[0]["found"] for name in ("variables", "live_bytes")}
    return found | {"report": call(server.url, "fp8refit_last_report")}


def call(url: str, method: str, *arguments: str) -> list:
    answer = requests.post(f"{url}/collective_rpc", json={"method": method, "args": arguments}, timeout=60)
    answer.raise_for_status()
    return answer.json()["results"]


@contextmanager
def own() -> Iterator[None]:
    os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": 4, "GPU": 1})
    yield


@contextmanager
def running_already() -> Iterator[None]:
    """On this host, where nobody set the drop-in's variables."""
    address = f"127.0.0.1:{free_port()}"
    command = ["ray", "start", "--head", "--block", "--num-cpus=4", "--num-gpus=1", "--include-dashboard=false"]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command += ["--node-ip-address=127.0.0.1", f"--port={address.rpartition(':')[2]}"]
    head = subprocess.Popen([Path(sys.executable).with_name(command[0]), *command[1:]], env=environment)
    os.environ["RAY_ADDRESS"] = address
    try:
        yield
    finally:
        head.terminate()
        head.wait()


VARIABLES = "FP8REFIT_DROP_IN", "FP8REFIT_QUANTIZATION"

if __name__ == "__main__":
    import skyrl_servers  # by its name, under which the actor imports it

    skyrl_servers.main(Path(sys.argv[1]), sys.argv[2])
