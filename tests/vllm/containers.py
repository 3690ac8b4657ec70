"""vLLM engines in other containers than DeepSeek's, of several ranks."""

from functools import partial
from pathlib import Path

from subject import Subject, booted_as

from fp8refit import Broadcaster
from fp8refit.config import CollectiveConfig
from tests.engines.containers import CONFIGS, UNQUANTIZED, try_container
from tests.engines.static_scales import STATIC, write_static
from tests.tiny_models import save_model


def push(subject: Subject, policy: dict, wire: str) -> None:
    Broadcaster([subject.llm], collective=CollectiveConfig(wire=wire)).push(policy)


NOT_WRITTEN = ("mxfp8", UNQUANTIZED)
"""Formats of which `quantize` writes no checkpoint."""
PUSHES = {f"broadcast in {wire}": partial(push, wire=wire) for wire in ("fp8", "bf16")}


def run_container(layout: str, family: str, container: str, work: str) -> dict:
    folder = Path(work)
    save_model(family, 2, folder / f"{family}-bf16-2")
    container, _, kernel = container.partition(" in ")  # of a kernel's own
    booted = partial(booted_as, layout, kernel=kernel or "fp32")
    pushes = {} if layout == "multi-process" else PUSHES
    if container in STATIC:
        with booted(model=write_static(family, 2, container, folder / "own")) as subject:
            own = {"own": subject.state()}
        other = booted(model=write_static(family, 3, container, folder / "other"))
        return try_container(other, None, family, folder, pushes) | own
    if container in CONFIGS:
        options = {"load_format": "dummy", "hf_overrides": {"quantization_config": CONFIGS[container]}}
        own = {}
    else:  # the engine quantizes the checkpoint itself
        options = {"quantization": None if container == UNQUANTIZED else container}
        with booted(model=folder / f"{family}-bf16-2", **options) as subject:
            own = {"own": subject.state()}
    other = booted(model=folder / f"{family}-bf16-2", **options)
    fresh = None if container in NOT_WRITTEN else lambda fp8: booted(model=fp8)
    return try_container(other, fresh, family, folder, pushes) | own
