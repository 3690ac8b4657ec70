"""Trainers that share their precision with real SGLang engines."""

from pathlib import Path

from engines import booted_noise, look

from fp8refit import Refitter
from tests.engines.precision import train_and_refit
from tests.tiny_models import make_model


def run_precision(families: list[str], work: Path) -> dict:
    """Engines of noise, each moved to what a unified trainer has learned, and then to the same from BF16."""
    found = {}
    for family in families:
        with booted_noise(family, work) as engine:
            live = lambda engine=engine: look(engine, "live_bytes")  # noqa: E731
            found[family] = train_and_refit(family, make_model(family, 3).float(), Refitter(engine), live)
    return found
