"""GRPO to copy: a policy, an FP8 engine that samples for it, and a refit after every step. Learns in a minute on two CPU cores.

python examples/grpo_short.py                    # a transformers engine on the CPU
python examples/grpo_short.py --engine vllm      # a GPU with vLLM

A random Qwen3 with two layers is rewarded for answers whose tokens are in the prompt. `grpo.py` is the longer version, which
compares precisions and corrections and draws what it found.
"""

import argparse
import copy
import os
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported: the engine is in this process

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from fp8refit import Refitter
from fp8refit.training import correction

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, PROMPT, ANSWER = 32, 4, 8
"""Number of tokens, and lengths of prompts and answers."""
PROMPTS, GROUP = 16, 8
"""Prompts of a step, and answers of a prompt, whose rewards are compared."""
Sample = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From prompts, (B, P), to answers and their log-probabilities by the engine, (B, L)."""


def make_policy() -> nn.Module:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(DEVICE)


def transformers_engine(policy: nn.Module) -> tuple[object, Sample]:
    from fp8refit_transformers import to_block_fp8

    engine: Any = to_block_fp8(copy.deepcopy(policy))

    def sample(prompts: Tensor) -> tuple[Tensor, Tensor]:
        said = engine.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=ANSWER,
            do_sample=True,
            top_k=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answers = said.sequences[:, PROMPT:]
        return answers, pick(torch.stack(said.logits, 1), answers)

    return engine, sample


def vllm_engine(policy: nn.Module) -> tuple[object, Sample]:
    from vllm import LLM, SamplingParams

    with TemporaryDirectory() as folder:
        copied: Any = copy.deepcopy(policy).bfloat16()
        copied.save_pretrained(folder)
        llm = LLM(folder, quantization="fp8_per_block", skip_tokenizer_init=True, gpu_memory_utilization=0.3)
    options = SamplingParams(max_tokens=ANSWER, ignore_eos=True, logprobs=0, detokenize=False)

    def sample(prompts: Tensor) -> tuple[Tensor, Tensor]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
        said = [output.outputs[0] for output in llm.generate(asked, options, use_tqdm=False)]
        answers = torch.tensor([list(answer.token_ids) for answer in said], device=DEVICE)
        each = [[next(iter(token.values())).logprob for token in answer.logprobs] for answer in said]
        return answers, torch.tensor(each, device=DEVICE)

    return llm, sample


def pick(logits: Tensor, answers: Tensor) -> Tensor:
    """Log-probability of each token of each answer, (B, L)."""
    return logits.float().log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)


def logprobs_of(policy: nn.Module, prompts: Tensor, answers: Tensor) -> Tensor:
    """The trainer's own, (B, L)."""
    return pick(policy(input_ids=torch.cat([prompts, answers], 1)[:, :-1]).logits[:, PROMPT - 1 :], answers)


def reward(prompts: Tensor, answers: Tensor) -> Tensor:
    """The share of an answer's tokens that are in its prompt, (B,)."""
    return (answers[:, :, None] == prompts[:, None, :]).any(-1).float().mean(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with an FP8 engine")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--steps", type=int, default=70)
    options = parser.parse_args()

    torch.manual_seed(0)
    policy = make_policy()
    engine, sample = (vllm_engine if options.engine == "vllm" else transformers_engine)(policy)
    refitter = Refitter(engine)
    refitter.refit(policy.state_dict())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)

    for step in range(1, options.steps + 1):
        prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT), device=DEVICE).repeat_interleave(GROUP, 0)
        answers, rollout_logprobs = sample(prompts)
        rewards = reward(prompts, answers)
        groups = rewards.view(PROMPTS, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)

        logprobs = logprobs_of(policy, prompts, answers)
        mask = torch.ones_like(answers, dtype=torch.bool)
        both = logprobs.detach(), rollout_logprobs, mask
        weights = correction.importance_weights(*both)  # the engine's policy is not quite the trainer's
        loss = -(weights * advantages.view(-1, 1) * logprobs)[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

        report = refitter.refit(policy.state_dict())  # the next answers are the new policy's
        if step % 10 == 0 or step == 1:
            k3 = correction.mismatch(*both).k3
            print(f"version {report.version}: reward {rewards.mean():.2f}, k3 {k3:.1e}, refit {report.total_s:.3f} s")
    assert refitter.verify(policy.state_dict())  # every byte that the engine holds


if __name__ == "__main__":
    main()
