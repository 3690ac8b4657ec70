"""Refit a running vLLM server over HTTP from a policy that is trained in another process of the same host.

VLLM_PLUGINS=fp8refit vllm serve Qwen/Qwen3-0.6B --quantization fp8_per_block --gpu-memory-utilization 0.4
python examples/vllm_server.py Qwen/Qwen3-0.6B http://127.0.0.1:8000
"""

import json
import os
import sys
import urllib.request
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fp8refit import Refitter

PROMPT = [1, 2, 3, 4]
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {os.environ.get('FP8REFIT_API_KEY', '')}",  # if the server has one
}


def main(model: str, url: str) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    policy = policy.to("cuda" if torch.cuda.is_available() else "cpu")
    refitter = Refitter(url)
    for _ in range(3):
        with torch.no_grad():  # stands for an optimizer step
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-4)
        report = refitter.refit(policy.state_dict())
        print(f"version {report.version}: rollout {rollout(url)}")
    refitter.close()


def rollout(url: str) -> list[int]:
    served = ask(f"{url}/v1/models")["data"][0]["id"]
    asked = {"model": served, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return ask(f"{url}/v1/completions", asked)["choices"][0]["token_ids"]


def ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, HEADERS)) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
