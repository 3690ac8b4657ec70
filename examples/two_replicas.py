"""Send every policy of one trainer to two servers by one broadcast: both go over to it, or neither. Between GPUs FP8 travels.

export VLLM_PLUGINS=fp8refit
SERVE="vllm serve Qwen/Qwen3-0.6B --quantization fp8_per_block --tensor-parallel-size 2"
CUDA_VISIBLE_DEVICES=0,1 $SERVE --port 8000 &
CUDA_VISIBLE_DEVICES=2,3 $SERVE --port 8001 &
CUDA_VISIBLE_DEVICES=4 python examples/two_replicas.py Qwen/Qwen3-0.6B http://127.0.0.1:8000 http://127.0.0.1:8001
"""

import json
import os
import sys
import urllib.request
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fp8refit import Broadcaster

PROMPT = [1, 2, 3, 4]
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {os.environ.get('FP8REFIT_API_KEY', '')}",  # if the servers have one
}


def main(model: str, urls: list[str]) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    policy = policy.to("cuda" if torch.cuda.is_available() else "cpu")
    with Broadcaster(urls) as broadcaster:  # for servers on other hosts: collective={"host": an address of this one}
        for _ in range(3):
            with torch.no_grad():  # stands for an optimizer step
                for parameter in policy.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-4)
            report = broadcaster.push(policy.state_dict())
            assert report is not None, "only other ranks of a trainer's group get none"
            print(f"version {report.version} on {len(report.ranks)} ranks: rollouts {[rollout(url) for url in urls]}")


def rollout(url: str) -> list[int]:
    served = ask(f"{url}/v1/models")["data"][0]["id"]
    asked = {"model": served, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return ask(f"{url}/v1/completions", asked)["choices"][0]["token_ids"]


def ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, HEADERS)) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
