"""vLLM engines in other containers than DeepSeek's, of several ranks."""

from functools import partial
from pathlib import Path

from subject import booted_as

from tests.engines.containers import CONFIGS, try_container
from tests.tiny_models import save_model


def run_container(layout: str, family: str, container: str, work: str) -> dict:
    folder = Path(work)
    save_model(family, 2, folder / f"{family}-bf16-2")
    booted = partial(booted_as, layout, kernel="fp32")
    if container in CONFIGS:
        options = {"load_format": "dummy", "hf_overrides": {"quantization_config": CONFIGS[container]}}
        own = {}
    else:  # the engine quantizes the checkpoint itself
        options = {"quantization": container}
        with booted(model=folder / f"{family}-bf16-2", **options) as subject:
            own = {"own": subject.state()}
    other = booted(model=folder / f"{family}-bf16-2", **options)
    return try_container(other, lambda fp8: booted(model=fp8), family, folder) | own
