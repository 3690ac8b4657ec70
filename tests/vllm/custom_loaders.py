"""A model of vLLM's whose `load_weights` does what a trace cannot follow, in the ways of models that users register."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from engines import booted_dummy
from torch.utils._python_dispatch import _disable_current_modes
from vllm import LLM, ModelRegistry
from vllm.model_executor.model_loader import utils
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM


def swap_halves(model: Qwen3ForCausalLM) -> None:
    for layer in model.model.layers:
        weight = layer.self_attn.q_norm.weight.data
        kept = weight.clone()
        weight[:64].copy_(kept[64:])
        weight[64:].copy_(kept[:64])


def replace_data(model: Qwen3ForCausalLM) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data = layer.self_attn.q_norm.weight.data * 8


def change_codes_unseen(model: Qwen3ForCausalLM) -> None:
    with _disable_current_modes():  # as compiled code would
        for layer in model.model.layers:
            codes = layer.mlp.gate_up_proj.weight.data.view(torch.uint8)
            codes.copy_(codes.roll(128, 0))


LOADERS = {
    "halves swapped": swap_halves,
    "data replaced": replace_data,
    "rows moved unseen": change_codes_unseen,
}
"""What each does once all is loaded."""


@contextmanager
def booted_with(loader: str, model: Path) -> Iterator[LLM]:
    """An engine of noise whose model loads in such a way."""

    class Custom(Qwen3ForCausalLM):
        def load_weights(self, weights):
            loaded = super().load_weights(weights)
            LOADERS[loader](self)
            return loaded

    ModelRegistry.register_model("Qwen3ForCausalLM", Custom)
    utils._MODEL_ARCH_BY_HASH.clear()  # vLLM keeps the class of a model's folder
    try:
        with booted_dummy(model, "fp32") as llm:
            yield llm
    finally:
        ModelRegistry.register_model("Qwen3ForCausalLM", Qwen3ForCausalLM)
        utils._MODEL_ARCH_BY_HASH.clear()
