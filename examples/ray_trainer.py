"""A trainer and two vLLM engines, each an actor that Ray places: one broadcast refits both engines, or neither.

python examples/ray_trainer.py Qwen/Qwen3-0.6B
"""

import sys
from functools import partial
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

import fp8refit

PROMPT = [1, 2, 3, 4]
NUM_GPUS = int(torch.cuda.is_available())
placed = ray.remote(num_cpus=0, num_gpus=NUM_GPUS)


class Rollouts:
    def __init__(self, model: str) -> None:
        self.llm = LLM(model=model, quantization="fp8_per_block", max_model_len=512, skip_tokenizer_init=True)
        self.host = fp8refit.EngineHost(self.llm)

    def order(self, message: str) -> str:  # all that the trainer needs
        return self.host.answer(message)

    def generate(self) -> list[int]:
        sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
        return list(self.llm.generate({"prompt_token_ids": PROMPT}, sampling, use_tqdm=False)[0].outputs[0].token_ids)


class Trainer:
    def __init__(self, model: str, rollouts: list[Any]) -> None:
        self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.policy = self.policy.to("cuda" if NUM_GPUS else "cpu")
        engines = [fp8refit.HostedEngine(partial(ask, actor)) for actor in rollouts]
        address = ray.util.get_node_ip_address()  # where engines on other nodes meet the trainer
        self.broadcaster = fp8refit.Broadcaster(engines, collective={"host": address})

    def step(self) -> int:
        with torch.no_grad():  # stands for an optimizer step
            for parameter in self.policy.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-4)
        report = self.broadcaster.push(self.policy.state_dict())
        assert report is not None, "only other ranks of a trainer's group get none"
        return report.version


def ask(actor: ray.actor.ActorHandle, message: str, timeout_s: float) -> str:
    return ray.get(actor.order.remote(message), timeout=timeout_s)


def main(model: str) -> None:
    with ray.init():
        rollouts = [placed(Rollouts).remote(model) for _ in range(2)]
        trainer = placed(Trainer).remote(model, rollouts)
        for _ in range(3):
            version = ray.get(trainer.step.remote())
            print(f"version {version}: rollouts {ray.get([actor.generate.remote() for actor in rollouts])}")


if __name__ == "__main__":
    main(sys.argv[1])
