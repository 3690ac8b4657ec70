"""Trainers' own code that sends a policy to vLLM on its GPU: what a sync takes with the drop-in and with a BF16 engine.

    python -m tests.gpu.run_trainers trl --shape qwen3-0.6b-untied --out benchmarks/results/synced_trl_h200.json

    trl         its GRPO trainer, with vLLM in its process; with `--sleeps` the engine sleeps between answers
    ms-swift    its mixin of trainers, which loads each policy into vLLM in its process
    openrlhf    its actor, which sends CUDA IPC handles, and its extension of vLLM's workers; DeepSpeed, Ray and more are stubs

Each is as in its wheel. After each sync with the drop-in, `verify` compares the engine with the trainer's weights, bit for bit.
Weights are random.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fp8refit.bench.clock import time_call
from fp8refit.bench.shapes import SHAPES, write_config
from tests.gpu import policies

WAYS = {
    "drop-in": {"FP8REFIT_DROP_IN": "1", "FP8REFIT_QUANTIZATION": "fp8_per_block"},
    "bf16": {},
}
"""What is set for a trainer, by the way that its weights take."""
PACKAGES = {"trl": "trl", "ms-swift": "ms_swift", "openrlhf": "openrlhf"}
NUM_WARM_UP = 3
TIMEOUT_S = 280
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
ROOM = {"max_model_len": 512, "max_num_seqs": 8, "gpu_memory_utilization": 0.3, "skip_tokenizer_init": True}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}


def main() -> None:
    from fp8refit.bench.result import Findings, gpu_name, stamp, versions_of, write_result

    parser = argparse.ArgumentParser()
    parser.add_argument("trainer", choices=list(TRAINERS))
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b-untied")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sleeps", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.steps <= NUM_WARM_UP:
        parser.error(f"--steps {args.steps}: the first {NUM_WARM_UP} are not counted; ask for more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and `run_way` ends what it began, which would go on
    with tempfile.TemporaryDirectory(prefix="fp8refit-synced-") as folder:
        found = {way: run_way(way, Path(folder), args) for way in WAYS}
    synced = found["drop-in"]["steps"]
    is_right = all(step["equal"] and step["version"] == 1 + place for place, step in enumerate(synced))
    if not is_right or any(this["sum"] == next["sum"] for this, next in pairwise(synced)):
        sys.exit(json.dumps(found, indent=1))
    result = {
        "what": TRAINERS[args.trainer].__doc__,
        "trainer": args.trainer,
        "shape": args.shape,
        "sleeps": args.sleeps,
        "command": shlex.join(["python", "-m", "tests.gpu.run_trainers", *sys.argv[1:]]),
        "gpu": gpu_name(),
        "versions": versions_of(PACKAGES[args.trainer], "vllm", "transformers"),
        "sync_ms": {way: summary(each["steps"]) for way, each in found.items()},
        "num_syncs": len(synced),
    }
    write_result(Findings(**stamp(), **result), args.out)


def summary(steps: list[dict]) -> dict[str, float]:
    """Milliseconds."""
    times = [1e3 * step["sync_s"] for step in steps]
    return {"first": times[0], "median": statistics.median(times[NUM_WARM_UP:]), "max": max(times[NUM_WARM_UP:])}


def run_way(way: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, since a plugin acts when vLLM is imported."""
    out = folder / f"{way}.json"
    command = [
        sys.executable,
        "-c",
        f"from tests.gpu.run_trainers import train; train({args.trainer!r}, {args.shape!r}, ",
    ]
    command[-1] += f"{str(folder)!r}, {str(out)!r}, num_steps={args.steps}, sleeps={args.sleeps})"
    environment = {name: value for name, value in os.environ.items() if name not in WAYS["drop-in"]}
    process = subprocess.Popen(command, env=environment | WAYS[way], start_new_session=True)
    try:
        code = process.wait(TIMEOUT_S)
    finally:  # an engine's processes too
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if code:
        sys.exit(f"{args.trainer}, {way}: ended with {code}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def train(trainer: str, shape: str, folder: str, out: str, *, num_steps: int, sleeps: bool) -> None:
    """Write what each sync took, and whether the engine then held the trainer's weights."""
    steps: list[dict[str, Any]] = []

    def note(sync: Callable[[], object], llm: Any, policy: Callable[[], Mapping[str, Tensor]]) -> None:
        def synced() -> None:
            sync()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize(DEVICE)

        steps.append({"sync_s": time_call(synced, DEVICE)[0]})
        if "FP8REFIT_DROP_IN" in os.environ:
            steps[-1] |= look(llm, policy())

    TRAINERS[trainer](shape, Path(folder), note, num_steps=num_steps, sleeps=sleeps)
    Path(out).write_text(json.dumps({"steps": steps}))
    os._exit(0)  # what engines take down takes seconds


@cache
def refitter(llm: Any) -> Any:
    """One for all syncs: what closes one has the next policy planned anew."""
    import fp8refit

    return fp8refit.Refitter(llm)


def look(llm: Any, policy: Mapping[str, Tensor]) -> dict[str, Any]:
    """Which policy the engine has taken, whether it is this one, and what tells it from the next."""
    (report,) = llm.collective_rpc("fp8refit_last_report")
    equal = bool(refitter(llm).verify(policy))
    total = sum(float(tensor.double().sum()) for tensor in policy.values())
    return {"version": json.loads(report)["version"], "equal": equal, "sum": total}


Note = Callable[[Callable[[], object], Any, Callable[[], Mapping[str, Tensor]]], None]
"""Takes a sync to time, the engine, and what gives the trainer's weights."""


def train_trl(shape: str, folder: Path, note: Note, *, num_steps: int, sleeps: bool) -> None:
    """TRL's GRPO trainer, vLLM in its process"""
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from tests.vllm.tokens import tokenizer_of_bytes

    model = folder / "model"
    if not model.exists():
        config = AutoConfig.for_model(**SHAPES[shape] | {"bos_token_id": None, "eos_token_id": None})
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)
        tokenizer_of_bytes().save_pretrained(model)

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        return [sum(tokens) % 97 / 97 for tokens in completion_ids]

    asked = GRPOConfig(
        output_dir=f"{folder}/out",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=256,
        vllm_gpu_memory_utilization=0.3,
        vllm_enable_sleep_mode=sleeps,
        use_cpu=DEVICE.type == "cpu",
        bf16=DEVICE.type == "cuda",
        model_init_kwargs={"dtype": "bfloat16"},
        max_steps=num_steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        temperature=1.0,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
    )
    prompts = Dataset.from_dict({"prompt": ["one two", "three", "four five six", "seven"] * num_steps})
    trainer = GRPOTrainer(model=str(model), reward_funcs=reward, args=asked, train_dataset=prompts)
    sync, engine = trainer.vllm_generation.sync_weights, trainer.vllm_generation.llm
    trainer.vllm_generation.sync_weights = lambda: note(sync, engine, trainer.model.state_dict)
    trainer.train()


def train_swift(shape: str, folder: Path, note: Note, *, num_steps: int, sleeps: bool) -> None:
    """ms-swift's mixin of trainers, vLLM in its process"""
    assert not sleeps, "ms-swift's own code that puts an engine to sleep is not run here"
    llm = boot(shape, folder, is_inside=True)
    from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin
    from swift.rlhf_trainers.utils import finish_vllm_weight_reload

    network = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    trainer = SimpleNamespace(
        vllm_mode="colocate", rollout_enable_lora=False, engine=SimpleNamespace(inner_model=network)
    )

    def send(policy: Mapping[str, Tensor]) -> None:
        RolloutTrainerMixin._load_state_dict_to_vllm(trainer, dict(policy))
        finish_vllm_weight_reload(network, model_config=llm.llm_engine.model_config, target_device=DEVICE)

    sync_policies(shape, llm, send, note, num_steps)


def train_openrlhf(shape: str, folder: Path, note: Note, *, num_steps: int, sleeps: bool) -> None:
    """OpenRLHF's actor by CUDA IPC, its extension in vLLM's worker"""
    assert not sleeps, "OpenRLHF's own code that puts an engine to sleep is not run here"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # as OpenRLHF's actor sets it
    extension = "tests.gpu.openrlhf_worker.WorkerWrap"
    llm = boot(shape, folder, is_inside=False, worker_extension_cls=extension)
    from tests.gpu import openrlhf_worker  # noqa: F401  its stubs; before the boot, vLLM would look for Ray's cluster

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    from openrlhf.trainer.ray import ppo_actor

    torch.distributed.init_process_group("gloo")
    ppo_actor.ray = SimpleNamespace(get=lambda refs: refs)
    ppo_actor.deepspeed = SimpleNamespace(
        zero=SimpleNamespace(GatheredParameters=lambda *_, **__: nullcontext()), module_inject=None
    )
    actor = ppo_actor.ActorPPOTrainer.__new__(ppo_actor.ActorPPOTrainer)
    asked = SimpleNamespace(
        vllm=SimpleNamespace(enable_prefix_caching=True), ds=SimpleNamespace(zero_stage=2, tensor_parallel_size=1)
    )
    actor.strategy, actor.use_cuda_ipc, actor.vllm_engines = SimpleNamespace(args=asked), True, [RayHandle(llm)]

    def send(policy: Mapping[str, Tensor]) -> None:
        named = [(name, torch.nn.Parameter(tensor)) for name, tensor in policy.items()]
        module = SimpleNamespace(named_parameters=lambda: named)
        actor.actor = SimpleNamespace(model=SimpleNamespace(module=module))
        actor.broadcast_to_vllm()

    sync_policies(shape, llm, send, note, num_steps)


class RayHandle:
    """In place of the handle of OpenRLHF's actor of Ray, whose methods call those of the workers."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, method: str) -> Any:
        if method == "reset_prefix_cache":
            return SimpleNamespace(remote=self._llm.reset_prefix_cache)
        return SimpleNamespace(remote=lambda *args, **options: self._llm.collective_rpc(method, None, args, options))


def boot(shape: str, folder: Path, *, is_inside: bool, **options: Any) -> Any:
    """With random weights, and CUDA graphs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if is_inside else "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # whoever asked whether there is CUDA cannot fork
    os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")
    from vllm import LLM

    model = folder / "config"
    if not model.exists():
        write_config(shape, model)
    how: dict[str, Any] = {"compilation_config": GRAPHS} if DEVICE.type == "cuda" else {"enforce_eager": True}
    return LLM(model=str(model), load_format="dummy", dtype="bfloat16", **ROOM, **how, **options)


def sync_policies(
    shape: str, llm: Any, send: Callable[[Mapping[str, Tensor]], None], note: Note, num_steps: int
) -> None:
    """Another policy each time, with answers between them."""
    policy = policies.allocate(shape)
    for step in range(num_steps):
        policies.fill_policy(policy, 1 + step % 2)
        note(lambda: send(policy), llm, lambda: policy)
        say(llm)


def say(llm: Any) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [(13 * i) % 200 for i in range(24)]}], sampling, use_tqdm=False)


TRAINERS: dict[str, Callable[..., None]] = {"trl": train_trl, "ms-swift": train_swift, "openrlhf": train_openrlhf}


if __name__ == "__main__":
    main()
