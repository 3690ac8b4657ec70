"""Trainers that share their precision with real vLLM engines."""

from pathlib import Path

from engines import booted_dummy, live_bytes

from fp8refit import Refitter
from tests.engines.precision import train_and_refit
from tests.tiny_models import make_model


def run_precision(cases: list, work: str) -> dict:
    """Dummy engines, each moved to what a unified trainer has learned, and then to the same from BF16."""
    found = {}
    for family, kernel in cases:
        model = make_model(family, 3).float()  # before the engine boots, which changes the models of transformers
        with booted_dummy(Path(work) / f"{family}-bf16", kernel) as llm:
            found[f"{family}-{kernel}"] = train_and_refit(family, model, Refitter(llm), lambda llm=llm: live_bytes(llm))
    return found
