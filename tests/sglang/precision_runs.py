"""Trainers that share their precision with real SGLang engines."""

from pathlib import Path

import torch
from engines import booted_noise, look, make_policy

from fp8refit import Refitter, precision
from fp8refit.live.slots import SCALE_SUFFIX
from tests.tiny_models import make_model

IDS = torch.arange(80).view(2, 40)
NUM_STEPS = 2


def run_precision(families: list[str], work: Path) -> dict:
    """Engines of noise, each moved to what a unified trainer has learned, and then to the same from BF16."""
    return {family: train_and_refit(family, work) for family in families}


def train_and_refit(family: str, work: Path) -> dict:
    model = make_model(family, 3).float()
    with booted_noise(family, work) as engine:
        refitter = Refitter(engine)
        refitter.refit(make_policy(family, 1))
        layout = refitter.layout()
        unified = precision.unify(model, like=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        found: dict = {"losses": [], "num_quantized": [], "from_codes": [], "from_bf16": []}
        for _ in range(NUM_STEPS):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            served = unified.served()
            found["num_quantized"].append(refitter.refit(served).num_quantized)
            found["from_codes"].append(look(engine, "live_bytes"))
            refitter.refit(make_policy(family, 1))
            refitter.refit({name: tensor.bfloat16() for name, tensor in model.state_dict().items()})
            found["from_bf16"].append(look(engine, "live_bytes"))
            found["losses"].append(loss.item())
        return found | {
            "formats": sorted({str(slot.scale_format) for slot in layout.slots if slot.scale_format}),
            "num_unified": sum(name.endswith(SCALE_SUFFIX) for name in served),
        }
