"""Checkpoints with one scale per weight, and static scales of activations."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engines.containers import IGNORED, compressed
from tests.engines.subject import make_policy
from tests.tiny_models import save_model

FP8_MAX = 448.0
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What engines hold as one weight. Its parts have one scale, as in a checkpoint that an engine need not quantize anew."""
STATIC = {
    "compressed-tensors, static": compressed({"strategy": "tensor"}, {"strategy": "tensor"}, is_dynamic=False),
    "fp8, static": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": IGNORED},
    "modelopt, static": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": IGNORED},
}
"""What such checkpoints say, by container."""


def write_static(family: str, seed: int, container: str, folder: Path) -> Path:
    """Write the checkpoint of a policy."""
    save_model(family, seed, folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    policy = dict(_apart(make_policy(family, seed)))
    save_file(dict(_quantized(policy)), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": STATIC[container]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _apart(policy: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a policy, each expert by itself."""
    for name, weight in policy.items():
        parent, _, own = name.rpartition(".")
        if own == "gate_up_proj":
            for index, (gate, up) in enumerate(expert.chunk(2) for expert in weight):
                yield from ((f"{parent}.{index}.gate_proj.weight", gate), (f"{parent}.{index}.up_proj.weight", up))
        elif own == "down_proj":
            yield from ((f"{parent}.{index}.down_proj.weight", expert) for index, expert in enumerate(weight))
        elif name != "lm_head.weight" or weight is not policy["model.embed_tokens.weight"]:
            yield name, weight


def _quantized(policy: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, weight in policy.items():
        parent, own, _ = name.rsplit(".", 2) if name.endswith("_proj.weight") else ("", "", "")
        if not own:
            yield name, weight.clone()
            continue
        fused = next((names for names in FUSED if own in names), (own,))
        scale = max(policy[f"{parent}.{other}.weight"].abs().max().float() for other in fused) / FP8_MAX
        yield name, (weight.float() * (1 / scale)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        yield f"{parent}.{own}.weight_scale", scale.reshape(1)
        yield f"{parent}.{own}.input_scale", torch.tensor([0.02 + 0.001 * len(fused)])
