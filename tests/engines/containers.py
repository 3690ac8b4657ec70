"""Engines that boot from other containers than DeepSeek's: what they hold after refits, from every kind of source,
and what fresh ones hold that boot from what `quantize` writes for them.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from fp8refit.checkpoint import quantize_checkpoint
from tests.engines.subject import make_policy

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
IGNORED = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(2))]


def compressed(weights: dict[str, Any], activations: dict[str, Any], *, is_dynamic: bool = True) -> dict[str, Any]:
    """What a compressed-tensors checkpoint says."""
    group = {
        "targets": ["Linear"],
        "weights": FP8 | weights | {"dynamic": False},
        "input_activations": FP8 | activations | {"dynamic": is_dynamic},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": IGNORED,
        "config_groups": {"group_0": group},
    }


CONFIGS = {
    "compressed-tensors": compressed(
        {"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}
    ),
    "compressed-tensors, per channel": compressed({"strategy": "channel"}, {"strategy": "token"}),
    "compressed-tensors, per tensor": compressed({"strategy": "tensor"}, {"strategy": "token"}),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": ["lm_head"]},
    "modelopt, nvfp4": {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "ignore": ["lm_head", *(f"model.layers.{layer}.mlp.gat[e]" for layer in range(2))],
    },
}
"""What published checkpoints say that hold FP8, by container."""
UNQUANTIZED = "unquantized"
"""An engine that holds what the checkpoint does."""


def try_container(
    noise: AbstractContextManager[Any],
    fresh: Callable[[Path], AbstractContextManager[Any]] | None,
    family: str,
    work: Path,
    pushes: Mapping[str, Callable[[Any, dict], object]] | None = None,
) -> dict:
    """One engine from noise through every kind of source of policy 2, and a fresh one.

    Args:
        noise: Boots an engine with noise for weights, and gives its subject.
        fresh: Boots one from what `quantize` writes; None if it writes nothing for this engine.
        family: Of the model.
        work: A folder, where policy 2 is in `FAMILY-bf16-2`.
        pushes: Other ways to bring a policy to the engine of a subject.
    """
    policy, bf16, fp8 = make_policy(family, 2), work / f"{family}-bf16-2", Path(mkdtemp(dir=work))
    found: dict[str, Any] = {}
    with noise as subject:
        layout = subject.layout()
        sources = {"state dict": policy, "files": bf16, "stream": iter(policy.items())}
        if fresh is not None:
            quantize_checkpoint(bf16, fp8, like=layout)
            if not any(slot.format is not None and slot.format.needs_maximum for slot in layout.slots):
                sources["FP8 files"] = fp8  # their scales may differ, so a refit does not take them
        for kind, source in sources.items():
            subject.refit(make_policy(family, 1))
            found["other"] = subject.state()
            subject.refit(source)
            found[kind] = subject.state()
        for kind, push in (pushes or {}).items():
            subject.refit(make_policy(family, 1))
            push(subject, policy)
            found[kind] = subject.state()
    if fresh is None:
        return found
    with fresh(fp8) as subject:
        return found | {"fresh": subject.state(), "container": str(layout.container)}


def check(found: dict, container: str) -> None:
    """What every engine has to fulfil. One for which `quantize` writes nothing is compared with one that quantized itself."""
    if "fresh" not in found:
        assert found.keys() >= {"own", "state dict", "files", "stream", "other"}
        assert all(found[kind] == found["own"] for kind in found.keys() - {"other"})
        assert found["other"] != found["own"]
        return
    container, _, _ = container.partition(" in ")  # without a kernel's own
    own = "fp8" if container == "fp8_per_tensor" else "compressed-tensors"
    written = container.partition(",")[0] if container in CONFIGS else own
    assert found["container"] == written
    others = ("other", "fresh", "container")
    assert found.keys() >= {"state dict", "files", "stream", *others}
    has_one = "per_tensor" in container.replace(" ", "_") or "nvfp4" in container
    assert ("FP8 files" in found) != has_one
    for kind in found.keys() - {*others}:
        assert found[kind] == found["fresh"], kind
    assert found["other"] != found["fresh"]
