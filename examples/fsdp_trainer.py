"""Train with FSDP2 on every rank; rank 0 keeps a block-FP8 engine up to date. Runs anywhere:

torchrun --nproc-per-node 2 examples/fsdp_trainer.py
"""

import torch
import torch.distributed as dist
from fp8refit_transformers import to_block_fp8
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

import fp8refit

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
config = Qwen3Config(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
torch.manual_seed(0)
policy = Qwen3ForCausalLM(config).to(device)
for layer in policy.model.layers:
    fully_shard(layer)
fully_shard(policy)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
prompt = torch.tensor([[1, 2, 3, 4]], device=device)

is_first = dist.get_rank() == 0
if is_first:
    engine = to_block_fp8(Qwen3ForCausalLM(config).to(device))
    refitter = fp8refit.Refitter(engine)

for _ in range(3):
    loss = policy(prompt, labels=prompt).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with fp8refit.gathered(policy.state_dict()) as weights:  # on every rank: all of them take part
        if is_first:
            report = refitter.refit(weights)
    if is_first:
        tokens = engine.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        print(f"version {report.version}: loss {loss.item():.3f}, rollout {tokens[0, 4:].tolist()}")

dist.destroy_process_group()
