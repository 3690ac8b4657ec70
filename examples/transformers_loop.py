"""Keep a block-FP8 copy of a model up to date with its trainer. Runs anywhere: python examples/transformers_loop.py"""

import copy

import torch
from fp8refit_transformers import to_block_fp8
from transformers import Qwen3Config, Qwen3ForCausalLM

from fp8refit import Refitter

config = Qwen3Config(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
policy = Qwen3ForCausalLM(config)
engine = to_block_fp8(copy.deepcopy(policy))
refitter = Refitter(engine)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
prompt = torch.tensor([[1, 2, 3, 4]])

for _ in range(3):
    loss = policy(prompt, labels=prompt).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report = refitter.refit(policy.state_dict())
    tokens = engine.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    print(f"version {report.version}: loss {loss.item():.3f}, rollout {tokens[0, 4:].tolist()}")
