"""Trainers that share their precision with real vLLM engines."""

from pathlib import Path

import torch
from engines import booted_dummy, make_policy, model_of, wrong_tensors
from experts import wrong_experts

from fp8refit import Refitter, precision
from fp8refit.live.slots import SCALE_SUFFIX
from tests.tiny_models import make_model

IDS = torch.arange(80).view(2, 40)


def run_precision(cases: list, work: str) -> dict:
    """Dummy engines, each moved twice to what a unified trainer has learned."""
    return {f"{family}-{kernel}": train_and_refit(family, kernel, Path(work)) for family, kernel in cases}


def train_and_refit(family: str, kernel: str, work: Path) -> dict:
    model = make_model(family, 3).float()  # before the engine boots, which changes the models of transformers
    with booted_dummy(work / f"{family}-bf16", kernel) as llm:
        refitter = Refitter(llm)
        refitter.refit(make_policy(family, 1))
        layout = refitter.layout()
        unified = precision.unify(model, like=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        found = {"losses": [], "num_quantized": [], "wrong": [], "differing": []}
        for _ in range(2):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            served = unified.served()
            found["num_quantized"].append(refitter.refit(served).num_quantized)
            masters = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
            wrong = wrong_experts if "moe" in family else wrong_tensors
            found["wrong"] += wrong(llm, masters, kernel)
            found["losses"].append(loss.item())
            live = [bytes_of(tensor) for tensor in model_of(llm).parameters() if tensor.dtype is torch.float8_e4m3fn]
            found["differing"] += [
                name
                for name in served
                if name + SCALE_SUFFIX in served
                and not all(any(part in held for held in live) for part in parts(served[name]))
            ]
        return found | {
            "formats": sorted({str(slot.scale_format) for slot in layout.slots if slot.scale_format}),
            "num_unified": sum(name.endswith(SCALE_SUFFIX) for name in served),
        }


def parts(codes):
    """The rows that an engine holds one after the other, as bytes, whatever it fuses them with."""
    matrices = codes if codes.ndim == 3 else [codes]
    return [bytes_of(half) for matrix in matrices for half in matrix.chunk(2)]


def bytes_of(tensor):
    return tensor.detach().view(torch.uint8).numpy().tobytes()
