"""Refit a vLLM engine in this process from a policy that is trained beside it on the same GPU.

python examples/vllm_in_process.py Qwen/Qwen3-0.6B
"""

import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from fp8refit import Refitter


def main(model: str) -> None:
    llm = LLM(model=model, quantization="fp8_per_block", gpu_memory_utilization=0.4)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda()
    refitter = Refitter(llm)
    for _ in range(3):
        with torch.no_grad():  # stands for an optimizer step
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-4)
        print(refitter.refit(policy.state_dict()))
        print(llm.generate("The capital of France is", SamplingParams(max_tokens=16))[0].outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
