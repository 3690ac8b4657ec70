"""Refit an SGLang engine, whose scheduler is in another process, from a policy that is trained on the same GPU.

python examples/sglang_engine.py Qwen/Qwen3-0.6B Qwen/Qwen3-0.6B-FP8
"""

import sys

import sglang
import torch
from transformers import AutoModelForCausalLM

from fp8refit import Refitter


def main(model: str, block_fp8_model: str) -> None:
    engine = sglang.Engine(model_path=block_fp8_model, mem_fraction_static=0.4)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda()
    refitter = Refitter(engine)
    for _ in range(3):
        with torch.no_grad():  # stands for an optimizer step
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-4)
        print(refitter.refit(policy.state_dict()))
        print(engine.generate("The capital of France is", {"max_new_tokens": 16})["text"])
    engine.shutdown()


if __name__ == "__main__":  # SGLang's processes import this file again
    main(sys.argv[1], sys.argv[2])
