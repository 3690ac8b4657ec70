"""Trainers and engines of the tests here: tiny models, and layouts of engines that are not there."""

import torch

from fp8refit.live.formats import ScaleFormat
from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.live.slots import Stacked

IDS = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(0))


def ste(x, quantized):
    """The straight-through definition: the value of `quantized`, and the gradient of the identity."""
    return x + (quantized - x).detach()


def loss_of(model):
    return model(input_ids=IDS, labels=IDS).loss


def slot(name, full_shape, scale_format=None, **fields):
    """One that holds all of a tensor, quantized if there is a format."""
    return SlotLayout(
        name=name,
        module=name,
        full_shape=tuple(full_shape),
        **{
            "shape": tuple(full_shape),
            "offset": (0,) * len(full_shape),
            "dtype": "float8_e4m3fn" if scale_format else "bfloat16",
            "scale_format": scale_format,
            "block_size": (128, 128) if scale_format else None,
            "kernel": "TestKernel",
        }
        | fields,
    )


def layout_of(slots, stacked=(), **fields):
    return EngineLayout(
        engine="test",
        versions={},
        device="cpu",
        slots=tuple(slots),
        stacked=tuple(stacked),
        **{"aliases": {}, "refusals": ()} | fields,
    )


def moe_layout(model, scale_format=ScaleFormat.FP32):
    """As vLLM's of Qwen3-MoE: each matrix of each expert is a slot, and stacks may come in their place."""
    slots, stacks = [], []
    for name, tensor in model.state_dict().items():
        if ".experts." not in name:
            is_linear = tensor.ndim == 2 and ("_proj" in name)
            slots.append(slot(name, tensor.shape, scale_format if is_linear else None))
            continue
        experts, rows, cols = tensor.shape
        keys = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        parts = {
            f"{name.rpartition('.')[0]}.{expert}.{key}.weight": (expert, place * rows // len(keys))
            for expert in range(experts)
            for place, key in enumerate(keys)
        }
        slots += [slot(part, (rows // len(keys), cols), scale_format) for part in parts]
        stacks.append(Stacked(name=name, shape=(experts, rows, cols), parts=parts))
    return layout_of(slots, stacks)


def make_trainer(family="qwen3", dtype=torch.float32, seed=0):
    from tests.tiny_models import make_model  # imports transformers, which ranks that need none of it would wait for

    return make_model(family, seed).to(dtype)
