"""Explore with a cheap engine, train on what an exact one says of the best and the worst: one policy in both, in one commit.

An engine in few bits samples many answers, as fast as it can. The trainer keeps those that say most, the best and the worst of
each prompt, and asks an engine in BF16 for their log-probabilities. Every policy goes to both by one broadcast, so no answer of
one is judged by another policy of the other. Sol-RL did this for diffusion (explore in NVFP4, make the chosen ones again in
BF16); here it is language, and the chosen answers are scored.

export VLLM_PLUGINS=fp8refit
CUDA_VISIBLE_DEVICES=0 vllm serve Qwen3-0.6B-NVFP4 --port 8000 &      # or Qwen/Qwen3-0.6B --quantization fp8_per_block
CUDA_VISIBLE_DEVICES=1 vllm serve Qwen/Qwen3-0.6B --port 8001 &
CUDA_VISIBLE_DEVICES=2 python examples/explore.py Qwen/Qwen3-0.6B http://127.0.0.1:8000 http://127.0.0.1:8001
"""

import argparse
import json
import os
import urllib.request
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fp8refit import Broadcaster
from fp8refit.training import correction

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS, PROMPT, ANSWER = 16, 4, 8
"""Token ids that prompts are made of, and lengths of prompts and answers."""
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {os.environ.get('FP8REFIT_API_KEY', '')}",  # if the servers have one
}


class Engine:
    """A vLLM server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.model = self._ask("/v1/models")["data"][0]["id"]

    def sample(self, prompt: list[int], num_answers: int) -> tuple[Tensor, Tensor]:
        """Answers to a prompt, (N, L), and the log-probabilities of their tokens."""
        options = {"n": num_answers, "max_tokens": ANSWER, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
        choices = self._complete(prompt, options)
        answers = torch.tensor([choice["token_ids"] for choice in choices], device=DEVICE)
        return answers, torch.tensor([choice["logprobs"]["token_logprobs"] for choice in choices], device=DEVICE)

    def score(self, prompt: list[int], answer: list[int]) -> list[float]:
        """The log-probability of each token of an answer."""
        (choice,) = self._complete(prompt + answer, {"max_tokens": 1, "prompt_logprobs": 0})
        found = choice["prompt_logprobs"][len(prompt) :]
        return [token[str(each)]["logprob"] for token, each in zip(found, answer, strict=True)]

    def _complete(self, prompt: list[int], options: dict[str, Any]) -> list[dict[str, Any]]:
        asked = {"model": self.model, "prompt": prompt, "temperature": 1.0, **options}
        choices: list[dict[str, Any]] = self._ask("/v1/completions", asked)["choices"]
        return choices

    def _ask(self, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + route, data, HEADERS)) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def logprobs_of(policy: nn.Module, prompts: Tensor, answers: Tensor) -> Tensor:
    """The trainer's own, (B, L)."""
    logits = policy(input_ids=torch.cat([prompts, answers], 1)[:, :-1]).logits[:, PROMPT - 1 :]
    found: Tensor = logits.float().log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)
    return found


def reward(prompts: Tensor, answers: Tensor) -> Tensor:
    """The share of an answer's tokens that are in its prompt, (B,)."""
    return (answers[:, :, None] == prompts[:, None, :]).any(-1).float().mean(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on the best and the worst of many answers")
    parser.add_argument("model")
    parser.add_argument("explorer", help="URL of the engine that samples")
    parser.add_argument("scorer", help="URL of the engine in BF16")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--answers", type=int, default=32, help="to each prompt")
    parser.add_argument("--kept", type=int, default=4, help="of the best, and as many of the worst")
    options = parser.parse_args()

    policy = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(DEVICE)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0)
    explorer, scorer = Engine(options.explorer), Engine(options.scorer)
    with Broadcaster([explorer.url, scorer.url]) as broadcaster:
        broadcaster.push(policy.state_dict())
        for _ in range(options.steps):
            prompts, answers, advantages, explored, scored = [], [], [], [], []
            mean = 0.0
            for prompt in torch.randint(WORDS, (options.prompts, PROMPT), device=DEVICE):
                found, logprobs = explorer.sample(prompt.tolist(), options.answers)
                rewards = reward(prompt.expand(len(found), -1), found)
                order = rewards.argsort(descending=True)
                kept = torch.cat([order[: options.kept], order[-options.kept :]])
                mean += rewards.mean().item() / options.prompts
                prompts.append(prompt.expand(len(kept), -1))
                answers.append(found[kept])
                advantages.append((rewards[kept] - rewards.mean()) / (rewards.std() + 1e-4))
                explored.append(logprobs[kept])
                scored += [scorer.score(prompt.tolist(), answer) for answer in found[kept].tolist()]

            said = torch.cat(answers)
            old, mask = torch.tensor(scored, device=DEVICE), torch.ones_like(said, dtype=torch.bool)
            logprobs = logprobs_of(policy, torch.cat(prompts), said)
            explored_logprobs = torch.cat(explored)
            weights = correction.importance_weights(old, explored_logprobs, mask)  # as if the exact engine had sampled
            loss: Any = -(weights * torch.cat(advantages)[:, None] * logprobs)[mask].mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()

            k3 = [correction.mismatch(logprobs.detach(), each, mask).k3 for each in (explored_logprobs, old)]
            report = broadcaster.push(policy.state_dict())  # both serve it, or neither
            assert report is not None, "only other ranks of a trainer's group get none"
            print(
                f"version {report.version}: reward {mean:.2f}, k3 of the explorer {k3[0]:.1e}, of the scorer {k3[1]:.1e}"
            )


if __name__ == "__main__":
    main()
