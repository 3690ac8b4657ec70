"""vLLM engines in other containers than DeepSeek's, of several ranks."""

from functools import partial
from pathlib import Path

from subject import booted_as

from tests.engines.containers import CONFIGS, try_container
from tests.tiny_models import save_model


def run_container(layout: str, family: str, container: str, work: str) -> dict:
    folder = Path(work)
    save_model(family, 2, folder / f"{family}-bf16-2")
    noise = {"load_format": "dummy", "hf_overrides": {"quantization_config": CONFIGS[container]}}
    booted = partial(booted_as, layout, kernel="fp32")
    with_noise = booted(model=folder / f"{family}-bf16-2", **noise)
    return try_container(with_noise, lambda fp8: booted(model=fp8), family, folder)
