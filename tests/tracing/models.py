"""Models of one rank of an engine, on fake layers of the engine's shape, cut from a checkpoint by chunks and heads."""

from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor, nn

from fp8refit.live.slots import Inventory, Slot

FP8 = torch.float8_e4m3fn
HIDDEN, HEAD, NUM_HEADS, MLP = 256, 128, 4, 1024
SPLITS = [
    pytest.param(
        num_ranks, num_kv_heads, vocabulary, id=f"{num_ranks} ranks, {num_kv_heads} kv heads, {vocabulary} rows"
    )
    for num_ranks, num_kv_heads, vocabulary in [
        (1, 2, 259),
        (2, 1, 259),
        (2, 2, 320),
        (4, 2, 259),
        (4, 4, 130),
        (4, 1, 10),
    ]
]


def model_of(**modules) -> nn.Module:
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


class BlockLinear(nn.Module):
    """A block-FP8 linear layer of zeros."""

    def __init__(self, rows=256, cols=256, **attributes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, cols, dtype=FP8), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.ones(-(-rows // 128), -(-cols // 128)), requires_grad=False)
        for name, value in attributes.items():
            setattr(self, name, value)


class Layer(nn.Module):
    """A layer with live values that a test cut from a checkpoint."""

    def __init__(self, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None):
        super().__init__()
        for name, tensor in {"weight": weight, "weight_scale_inv": scale, "bias": bias}.items():
            if tensor is not None:
                self.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))


def checkpoint_of(num_kv_heads: int, vocabulary: int) -> dict[str, Tensor]:
    """Every matrix in block FP8 except the vocabulary and a plain one; no two values of a tensor alike but codes."""
    shapes = {
        "q_proj": (NUM_HEADS * HEAD, HIDDEN),
        "k_proj": (num_kv_heads * HEAD, HIDDEN),
        "v_proj": (num_kv_heads * HEAD, HIDDEN),
        "o_proj": (HIDDEN, NUM_HEADS * HEAD),
        "gate_proj": (MLP, HIDDEN),
        "up_proj": (MLP, HIDDEN),
        "down_proj": (HIDDEN, MLP),
        "fc_proj": (MLP, HIDDEN),
        "router": (128, HIDDEN),
    }
    generator = torch.Generator().manual_seed(0)
    checkpoint = {}
    for name, (rows, cols) in shapes.items():
        codes = torch.randint(0, 0x78, (rows, cols), generator=generator, dtype=torch.uint8)
        grid = (-(-rows // 128), -(-cols // 128))
        checkpoint[f"{name}.weight"] = codes.view(FP8)
        checkpoint[f"{name}.weight_scale_inv"] = 1 + torch.arange(prod(grid), dtype=torch.float32).view(grid)
        checkpoint[f"{name}.bias"] = torch.arange(rows, dtype=torch.float32)
    for name, shape in {"embed": (vocabulary, HIDDEN), "plain": (HIDDEN, MLP), "q_norm": (HEAD,)}.items():
        checkpoint[f"{name}.weight"] = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    return checkpoint | {
        "head.weight": checkpoint["embed.weight"] + 0.5,
        "head.bias": torch.arange(vocabulary, dtype=torch.float32),
    }


def model_of_rank(checkpoint: dict[str, Tensor], rank: int, num_ranks: int) -> nn.Module:
    """The model of one rank, cut by chunks and heads as the engines' documentation says it, not by offsets."""
    num_kv_heads = checkpoint["k_proj.bias"].shape[0] // HEAD
    kv_heads = range(rank * num_kv_heads // num_ranks, ((rank + 1) * num_kv_heads - 1) // num_ranks + 1)
    of_part = {
        "q_proj": lambda tensor: tensor.chunk(num_ranks)[rank],
        "k_proj": lambda tensor: torch.cat([tensor.chunk(num_kv_heads)[head] for head in kv_heads]),
        "gate_proj": lambda tensor: tensor.chunk(num_ranks)[rank],
    }
    of_part |= {"v_proj": of_part["k_proj"], "up_proj": of_part["gate_proj"], "fc_proj": of_part["gate_proj"]}
    leaves = {"weight": "weight", "scale": "weight_scale_inv", "bias": "bias"}

    def rows_of(*parts):
        return Layer(
            **{
                key: torch.cat([of_part[part](checkpoint[f"{part}.{leaf}"]) for part in parts])
                for key, leaf in leaves.items()
            }
        )

    def columns_of(name):
        cut = {key: checkpoint.get(f"{name}.{leaf}") for key, leaf in leaves.items()}
        return Layer(
            **{
                key: tensor.chunk(num_ranks, 1)[rank] if tensor is not None and key != "bias" else tensor
                for key, tensor in cut.items()
            }
        )

    def vocabulary_of(name):
        held = {}
        for key in ("weight", "bias"):
            tensor = checkpoint.get(f"{name}.{key}")
            if tensor is not None:
                num_padded = -tensor.shape[0] % 64
                padded = torch.cat([tensor, tensor.new_full((num_padded, *tensor.shape[1:]), -1.0)])
                held[key] = padded.chunk(num_ranks)[rank]
        return Layer(**held)

    return model_of(
        embed=vocabulary_of("embed"),
        qkv_proj=rows_of("q_proj", "k_proj", "v_proj"),
        q_norm=Layer(checkpoint["q_norm.weight"]),
        o_proj=columns_of("o_proj"),
        gate_up_proj=rows_of("gate_proj", "up_proj"),
        down_proj=columns_of("down_proj"),
        fc_proj=rows_of("fc_proj"),
        router=Layer(*(checkpoint[f"router.{leaf}"] for leaf in leaves.values())),
        plain=columns_of("plain"),
        head=vocabulary_of("head"),
    )


Read = Callable[[nn.Module], Inventory]


def check_ranks(read: Read, checkpoint: dict[str, Tensor], num_ranks: int) -> None:
    """Whether slots say which slices they hold, the ranks hold every value as often as they should, and miss no byte."""
    weights = {name: tensor for name, tensor in checkpoint.items() if not name.endswith("_scale_inv")}
    counts = {name: torch.zeros(tensor.shape, dtype=torch.int8) for name, tensor in weights.items()}
    for rank in range(num_ranks):
        model = model_of_rank(checkpoint, rank, num_ranks)
        inventory = read(model)
        assert not inventory.refusals
        assert {slot.name for slot in inventory.slots} <= set(weights), "a rank may hold nothing of a small vocabulary"
        assert [slot.name for slot in inventory.slots if not is_what_the_rank_holds(slot, checkpoint)] == []
        assert all(slot.offset == () or any(slot.offset) for slot in inventory.slots)
        for slot in inventory.slots:
            box(counts[slot.name], slot.origin, tuple(slot.weight.shape)).add_(1)
        _check_that_every_byte_is_covered(model, inventory)
    num_kv_copies = max(1, num_ranks * HEAD // checkpoint["k_proj.bias"].shape[0])
    on_every_rank = ("q_norm.weight", "router.weight", "router.bias", "o_proj.bias", "down_proj.bias")
    for name, count in counts.items():
        copies = num_kv_copies if name.startswith(("k_proj", "v_proj")) else 1
        assert (count == (num_ranks if name in on_every_rank else copies)).all(), name


def _check_that_every_byte_is_covered(model: nn.Module, inventory: Inventory) -> None:
    """Zero what slots and padding hold: nothing else is left of the model."""
    slots = [tensor for slot in inventory.slots for tensor in (slot.weight, slot.scale) if tensor is not None]
    for tensor in slots:
        tensor.detach().view(torch.uint8).fill_(0)
    for tensor in inventory.padding:
        assert (tensor == -1).all()
        tensor.zero_()
    assert not any(parameter.detach().view(torch.uint8).any() for parameter in model.parameters())


def box(tensor: Tensor, origin: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    for dim, (start, size) in enumerate(zip(origin, shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def is_what_the_rank_holds(slot: Slot, checkpoint: dict[str, Tensor]) -> bool:
    """Whether a slot's live bytes are those of the slice of the checkpoint that it says it holds."""
    tensor = checkpoint[slot.name]
    same = slot.full_shape == tuple(tensor.shape) and torch.equal(
        _raw(box(tensor, slot.origin, tuple(slot.weight.shape))), _raw(slot.weight)
    )
    if slot.scale is None:
        return same
    origin = tuple(start // 128 for start in slot.origin)
    scale = box(checkpoint[f"{slot.name}_scale_inv"], origin, tuple(slot.scale.shape))
    return same and torch.equal(scale, slot.scale)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
