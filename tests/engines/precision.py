"""A trainer that shares its precision with an engine, of which it is told the layout alone."""

from collections.abc import Callable

import torch
from torch import nn

from fp8refit import Refitter
from fp8refit.live.slots import SCALE_SUFFIX
from fp8refit.training import precision
from tests.engines.subject import make_policy

IDS = torch.arange(80).view(2, 40)
NUM_STEPS = 2
NUM_UNIFIED = {"qwen3": 14, "qwen3_moe": 12}


def train_and_refit(family: str, model: nn.Module, refitter: Refitter, live: Callable[[], object]) -> dict:
    """Steps of a unified trainer, each followed by a refit to its codes, and by one to its BF16 weights.

    Args:
        family: Of models.
        model: The trainer's, in float32.
        refitter: Of an engine of noise.
        live: What the engine holds.
    """
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
        found["from_codes"].append(live())
        refitter.refit(make_policy(family, 1))
        refitter.refit({name: tensor.bfloat16() for name, tensor in model.state_dict().items()})
        found["from_bf16"].append(live())
        found["losses"].append(loss.item())
    return found | {
        "formats": sorted({str(slot.scale_format) for slot in layout.slots if slot.scale_format}),
        "num_unified": sum(name.endswith(SCALE_SUFFIX) for name in served),
    }


def hold_what_is_served(found: dict, family: str, scale_format: str) -> None:
    """The codes of training are those that the engine would make of the trainer's weights, and go into it as they are."""
    assert found["formats"] == [scale_format]
    assert found["num_unified"] == NUM_UNIFIED[family]
    assert found["num_quantized"] == [0] * NUM_STEPS
    assert found["from_codes"] == found["from_bf16"]
    assert found["from_codes"][0] != found["from_codes"][1]
    assert found["losses"][1] < found["losses"][0]
