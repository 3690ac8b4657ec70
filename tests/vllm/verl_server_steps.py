"""verl's own `ServerAdapter` and the actor of its vLLM server, unmodified, on GPUs that only Ray believes in: three steps.

    python verl_server_steps.py FOLDER NUM_RANKS

Of verl are the adapter on each rank of the trainer, the replica that starts the server, and the server. Writes what
`verl_steps.py` writes.
"""

import asyncio
import json
import os
import sys
import threading
from pathlib import Path

import ray
import requests
import torch
from tokens import tokenizer_of_bytes
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter
from verl_steps import NUM_STEPS, PROBED, train

from tests.tiny_models import save_model


@ray.remote(num_gpus=1, num_cpus=0)
class TrainerRank:
    """Holds a GPU of Ray's, next to which verl starts a rank of the engine."""


def main(folder: Path, num_ranks: int) -> None:
    model = save_model("qwen2_wide", 1, folder / "model").train()
    tokenizer_of_bytes().save_pretrained(folder / "model")
    ray.init(num_cpus=4, num_gpus=num_ranks, include_dashboard=False, logging_level="ERROR")
    config = RolloutConfig(
        name="vllm",
        tensor_model_parallel_size=num_ranks,
        enforce_eager=True,
        enable_sleep_mode=False,  # a CPU has none
        free_cache_engine=False,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        engine_kwargs={"vllm": {"num_gpu_blocks_override": 64}},
    )
    model_config = HFModelConfig(path=str(folder / "model"))
    replica = vLLMReplica(0, config, model_config, gpus_per_node=num_ranks)
    replica.rollout_mode, replica.workers = RolloutMode.HYBRID, [TrainerRank.remote() for _ in range(num_ranks)]
    asyncio.run(replica.launch_servers())
    adapters = [adapter_of(rank, num_ranks, config, model_config) for rank in range(num_ranks)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[dict] = []
    error = ""
    try:
        for step in range(NUM_STEPS):
            train(model, optimizer, step)
            model.save_pretrained(folder / f"policy-{step}")
            on_every_rank(adapters, lambda adapter, step=step: update(adapter, model, step))
            seen.append(look(f"http://{replica._server_address}"))
    except Exception as raised:  # noqa: BLE001 - of the control
        error = f"{type(raised).__name__}: {raised}"
    (folder / "found.json").write_text(json.dumps({"steps": seen, "error": error}))
    ray.shutdown()


def adapter_of(rank: int, num_ranks: int, config: RolloutConfig, model_config: HFModelConfig) -> ServerAdapter:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "RAY_LOCAL_WORLD_SIZE": str(num_ranks)}
    return ServerAdapter(config, model_config, None)


def on_every_rank(adapters: list[ServerAdapter], call) -> None:
    errors: list[Exception] = []

    def run(adapter: ServerAdapter) -> None:
        try:
            asyncio.run(call(adapter))
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(adapter,), daemon=True) for adapter in adapters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100 if not errors else 1)
    if errors:
        raise errors[0]


async def update(adapter: ServerAdapter, model: torch.nn.Module, step: int) -> None:
    """As verl's engine workers do it."""
    await adapter.resume(tags=["weights"])
    await adapter.update_weights(iter(model.state_dict().items()), global_steps=step)
    await adapter.resume(tags=["kv_cache"])


def look(url: str) -> dict:
    def call(method: str, *arguments: str) -> list:
        asked = {"method": method, "args": arguments}
        return requests.post(f"{url}/collective_rpc", json=asked, timeout=60).json()["results"]

    asked = {"prompt": PROBED, "max_tokens": 4, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    answer = requests.post(f"{url}/v1/completions", json=asked, timeout=60).json()
    return {
        "live": [answer["found"] for answer in call("observe", "live_bytes")],
        "places": [answer["found"] for answer in call("observe", "places")],
        "said": {"logprobs": answer["choices"][0]["logprobs"]},
        "versions": [json.loads(report)["version"] for report in call("fp8refit_last_report")],
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]), int(sys.argv[2]))
