"""One policy and one scale format for every engine: whichever is refitted to it must hold the same weights and scales.

Engines live in environments that exclude each other, so each is compared with `DIGEST`, in the tests of its own. A `digest_of`
goes over names, weights and scales of a checkpoint; `as_checkpoint` takes an engine's live tensors apart into those, by names
and shapes alone. Everything here is the same on any machine: integers, times powers of two.
"""

import hashlib
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

DIGEST = "11014694b8bb7599fbbf312b780c48c20ecc434557f29212b354e5f71d78e39d"
"""Of `make_policy()` in block FP8 with fp32 scales."""

FAMILY = "qwen3"
"""Of `tests.tiny_models`: the model that the policy is for."""
SCALE = "weight_scale_inv"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The layers in which vLLM and SGLang keep several of a checkpoint's, one above the other."""
_HIDDEN, _HEAD, _ROWS = 256, 128, {"q_proj": 512, "k_proj": 256, "v_proj": 256, "gate_proj": 512, "up_proj": 512}
_BLOCK = 128


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (259, _HIDDEN)}
    for layer in ("model.layers.0", "model.layers.1"):
        for name in ("q_proj", "k_proj", "v_proj"):
            found[f"{layer}.self_attn.{name}.weight"] = (_ROWS[name], _HIDDEN)
        found[f"{layer}.self_attn.o_proj.weight"] = (_HIDDEN, _ROWS["q_proj"])
        for name in ("q_norm", "k_norm"):
            found[f"{layer}.self_attn.{name}.weight"] = (_HEAD,)
        for name in ("gate_proj", "up_proj"):
            found[f"{layer}.mlp.{name}.weight"] = (_ROWS[name], _HIDDEN)
        found[f"{layer}.mlp.down_proj.weight"] = (_HIDDEN, _ROWS["up_proj"])
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{name}.weight"] = (_HIDDEN,)
    return found | {"model.norm.weight": (_HIDDEN,), "lm_head.weight": (259, _HIDDEN)}


def make_policy() -> dict[str, Tensor]:
    """A BF16 state dict. Blocks differ in their largest value, so that they differ in scale."""
    return {name: _integers(name, shape) * 2.0**-11 for name, shape in shapes().items()}


def _integers(name: str, shape: tuple[int, ...]) -> Tensor:
    """Integers that BF16 holds exactly."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    largest = torch.randint(64, 256, [-(-size // _BLOCK) for size in shape], generator=generator)
    for axis, size in enumerate(shape):
        largest = largest.repeat_interleave(_BLOCK, axis).narrow(axis, 0, size)
    values = torch.randint(-255, 256, shape, generator=generator)
    return (values * largest).div(255, rounding_mode="trunc").to(torch.bfloat16)


def as_checkpoint(live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors, out of an engine's by the engine's names; padding rows are left out."""
    places = {
        part: (fused, sum(_ROWS[name] for name in parts[:index]))
        for fused, parts in FUSED.items()
        for index, part in enumerate(parts)
    }
    found = {}
    for name, (num_rows, *_) in shapes().items():
        module = name.removesuffix(".weight")
        parent, _, last = module.rpartition(".")
        fused, start = places.get(last, (last, 0))
        owner = f"{parent}.{fused}".lstrip(".")
        found[name] = live[f"{owner}.weight"][start : start + num_rows]
        if f"{owner}.{SCALE}" in live:
            rows = slice(start // _BLOCK, -(-(start + num_rows) // _BLOCK))
            found[f"{module}.{SCALE}"] = live[f"{owner}.{SCALE}"][rows]
    return found


def digest_of(checkpoint: Mapping[str, Tensor]) -> str:
    """A sha256 over (name, weight, scale) of every tensor, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(name for name in checkpoint if not name.endswith(SCALE)):
        scale = checkpoint.get(f"{name.removesuffix('.weight')}.{SCALE}")
        for part in (name.encode(), _bytes(checkpoint[name]), b"" if scale is None else _bytes(scale)):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
