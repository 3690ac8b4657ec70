"""LoRA adapters of an engine: their files, and one of them refitted to other matrices in every way, and after faults. What must
come of it: `adapter_tests.py`.
"""

import json
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engines.subject import Subject, make_policy

MODULES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
"""Alone, and fused with others of which the adapter has none; cut by rows and by columns."""
RANK, ALPHA = 4, 6
"""Their quotient is no power of two, so products round."""


class Adapters(Protocol):
    """The adapters of an engine: `one`, `two` and `three`, of which two have room."""

    subject: Subject

    def refit(self, name: str, state_dict: Any, lora_config: Any = None, **options: Any) -> Any: ...

    def say(self, name: str | None) -> list[dict]:
        """What the engine says with an adapter. It is loaded if it is not."""

    def num_cached(self, name: str) -> int:
        """How many tokens of a prompt the engine has in its cache."""

    def state(self) -> dict:
        """What every rank holds, and what the engine says with each of two adapters, and without."""


def try_adapters(engine: Adapters, family: str, folder: Path, other_config: dict) -> dict:
    """Adapters of an engine that has policy 1, of which one is refitted."""
    subject, new, other = engine.subject, matrices(family, 8), matrices(family, 9)
    save_adapter(folder / "new", new)
    found: dict[str, Any] = {"loaded": [engine.say("one"), engine.say("two")], "before": engine.state()}
    found["versions"] = [engine.refit("one", tensors).version for tensors in (other, in_model(new))]
    found["cached"] = engine.num_cached("one")
    found["new"] = engine.state()
    found["layout"] = subject.layout().model_dump(mode="json")
    found["wrong"] = {}
    for name, wrong in wrong_matrices(new).items():
        found["wrong"][name] = subject.refused(engine.refit, "one", wrong)
    found["wrong"]["unknown adapter"] = subject.refused(engine.refit, "nobody", new)
    found["wrong"]["whole config"] = subject.refused(engine.refit, "one", new, {"default": other_config})
    found["after_wrong"], found["dirty_after_wrong"] = engine.state(), subject.is_dirty
    found["torn"] = torn(engine, family, new, other)
    engine.refit("one", other, other_config)
    found["other"] = engine.state()
    engine.refit("one", folder / "new" / "adapter_model.safetensors")
    found["from_file"] = engine.state()
    return found


def torn(engine: Adapters, family: str, new: dict, other: dict) -> dict:
    """Writes that fail in the middle: of the adapter, and of the weights."""
    subject, found = engine.subject, {}
    policies = {
        "adapter": (lambda: engine.refit("one", other), lambda: subject.refit(make_policy(family, 1))),
        "weights": (lambda: subject.refit(make_policy(family, 2)), lambda: engine.refit("one", new)),
    }
    heals = {"adapter": lambda: engine.refit("one", new), "weights": lambda: subject.refit(make_policy(family, 1))}
    for what, (fail, wrong) in policies.items():
        subject.look("arm", subject.num_ranks - 1, "fail")
        failed = subject.refused(fail)
        asked = subject.refused(lambda: engine.say("one"))
        found[what] = {"failed": failed, "dirty": subject.is_dirty, "asked": asked, "wrong": subject.refused(wrong)}
        heals[what]()
        found[what] |= {"state": engine.state(), "dirty_after": subject.is_dirty}
    return found


def matrices(family: str, seed: int) -> dict[str, Tensor]:
    """An adapter's matrices in float32, as PEFT saves them."""
    generator, tensors, policy = torch.Generator().manual_seed(seed), {}, make_policy(family, 1)
    for layer in range(2):
        for module in MODULES:
            rows, columns = policy[f"model.layers.{layer}.{module}.weight"].shape
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / 4
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) / 4
    return tensors


def in_model(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same as parameters of a model of PEFT, whose names hold the adapter's."""
    return {re.sub(r"(lora_[AB])", r"\1.default", name): torch.nn.Parameter(value) for name, value in tensors.items()}


def wrong_matrices(tensors: dict[str, Tensor]) -> dict[str, dict]:
    """Adapters that do not fit, or must not be served."""
    first, last = next(iter(tensors)), list(tensors)[-1]
    bad = tensors[last].clone()
    bad[-1, -1] = float("nan")
    return {
        "NaN": tensors | {last: bad},
        "missing": {name: value for name, value in tensors.items() if name != last},
        "unknown": tensors | {first.replace("q_proj", "k_proj"): torch.zeros(RANK, 256)},
        "a weight": tensors
        | {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": torch.zeros(256, 256)},
        "rank": {name: torch.cat([value, value], dim=int("lora_B" in name)) for name, value in tensors.items()},
        "twice": tensors | {first.replace("lora_A", "lora_A.default"): tensors[first]},
    }


def save_adapter(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """An adapter, as PEFT saves it."""
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(said | config))
    return folder
