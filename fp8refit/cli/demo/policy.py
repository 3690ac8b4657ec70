"""A byte-level policy with the Qwen3 architecture, and its optimizer."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3Config  # noqa: TID251 - the demo uses an engine as a user does

NUM_BYTES = 256
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
MAX_GRADIENT_NORM = 1.0


def make_policy() -> nn.Module:
    """Create the model with random fp32 weights, about three million parameters."""
    config = Qwen3Config(
        vocab_size=NUM_BYTES,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    policy: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return policy


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy in nats of every byte in `windows` (num_windows, length), given those before it."""
    logits = model(input_ids=windows[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, windows: Tensor) -> float:
    """`next_byte_loss` without gradients."""
    return next_byte_loss(model, windows).item()


class Trainer:
    """AdamW with warmup and linear decay over `num_steps`."""

    def __init__(self, policy: nn.Module, *, num_steps: int) -> None:
        self._policy = policy
        self._optimizer = torch.optim.AdamW(policy.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1 - step / (num_steps + 1))
        )

    def step(self, windows: Tensor) -> float:
        """Take one optimizer step and return the loss before it."""
        loss = next_byte_loss(self._policy, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._policy.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return loss.item()
