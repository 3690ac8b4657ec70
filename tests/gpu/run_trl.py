"""TRL's GRPO trainer, unmodified, with vLLM in its process: what a sync takes with the drop-in and with a BF16 engine.

    python -m tests.gpu.run_trl --shape qwen3-0.6b-untied --out benchmarks/results/trl_h200.json

After each sync with the drop-in, `verify` compares the engine with the trainer's weights, bit for bit. With `--sleeps` the
engine sleeps between answers. The model has random weights, and a tokenizer of bytes.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fp8refit.bench.clock import time_call
from fp8refit.bench.shapes import SHAPES

WAYS = {
    "drop-in": {"FP8REFIT_DROP_IN": "1", "FP8REFIT_QUANTIZATION": "fp8_per_block"},
    "bf16": {},
}
"""What is set for a trainer, by the way that its weights take."""
NUM_WARM_UP = 3
TIMEOUT_S = 280


def main() -> None:
    from fp8refit.bench.result import Findings, gpu_name, stamp, versions_of, write_result

    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b-untied")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sleeps", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fp8refit-trl-") as folder:
        save_model(args.shape, Path(folder) / "model")
        found = {way: run_way(way, Path(folder), args) for way in WAYS}
    synced = found["drop-in"]["steps"]
    if not all(step["equal"] and step["version"] == 1 + place for place, step in enumerate(synced)):
        sys.exit(json.dumps(found, indent=1))
    result = {
        "what": f"TRL's GRPO trainer of {args.shape}, vLLM in its process{' that sleeps between' if args.sleeps else ''}",
        "command": shlex.join(["python", "-m", "tests.gpu.run_trl", *sys.argv[1:]]),
        "gpu": gpu_name(),
        "versions": versions_of("trl", "vllm", "transformers"),
        "sync_ms": {way: summary(each["steps"]) for way, each in found.items()},
        "equal": [step["equal"] for step in found["drop-in"]["steps"]],
        "policies": [step["version"] for step in found["drop-in"]["steps"]],
    }
    write_result(Findings(**stamp(), **result), args.out)


def summary(steps: list[dict]) -> dict[str, float]:
    """Milliseconds."""
    times = [1e3 * step["sync_s"] for step in steps]
    return {"first": times[0], "median": statistics.median(times[NUM_WARM_UP:]), "max": max(times[NUM_WARM_UP:])}


def save_model(shape: str, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.vllm.tokens import tokenizer_of_bytes

    config = AutoConfig.for_model(**SHAPES[shape] | {"bos_token_id": None, "eos_token_id": None})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer_of_bytes().save_pretrained(folder)


def run_way(way: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, since a plugin acts when vLLM is imported."""
    out = folder / f"{way}.json"
    command = [sys.executable, "-c", f"from tests.gpu.run_trl import train; train({str(folder)!r}, {str(out)!r}, "]
    command[-1] += f"num_steps={args.steps}, sleeps={args.sleeps})"
    environment = {name: value for name, value in os.environ.items() if name not in WAYS["drop-in"]}
    subprocess.run(command, env=environment | WAYS[way], check=True, timeout=TIMEOUT_S)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def train(folder: str, out: str, *, num_steps: int, sleeps: bool) -> None:
    """Write what each sync took, and whether the engine then held the trainer's weights."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    import fp8refit

    steps: list[dict[str, Any]] = []
    is_fp8 = "FP8REFIT_DROP_IN" in os.environ

    def reward(completions: list[str], **_: object) -> list[float]:
        return [len(set(text)) + len(text) / 7 for text in completions]

    config = GRPOConfig(
        output_dir=f"{folder}/out",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=256,
        vllm_gpu_memory_utilization=0.3,
        vllm_enable_sleep_mode=sleeps,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
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
    trainer = GRPOTrainer(model=f"{folder}/model", reward_funcs=reward, args=config, train_dataset=prompts)
    sync, device = trainer.vllm_generation.sync_weights, next(trainer.model.parameters()).device

    def timed_sync() -> None:
        steps.append({"sync_s": time_call(sync, device)[0]})
        if is_fp8:  # the weights are awake now
            report = fp8refit.last_report()
            equal = bool(fp8refit.Refitter(trainer.vllm_generation.llm).verify(trainer.model.state_dict()))
            steps[-1] |= {"version": report.version if report else None, "equal": equal}

    trainer.vllm_generation.sync_weights = timed_sync
    trainer.train()
    Path(out).write_text(json.dumps({"steps": steps}))
    os._exit(0)  # what engines take down takes seconds


if __name__ == "__main__":
    main()
