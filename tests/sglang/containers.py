"""SGLang engines in other containers than DeepSeek's."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import bf16_of, booted
from subject import Subject

from tests.engines.containers import CONFIGS, try_container


def run_container(family: str, num_ranks: int, container: str, work: Path) -> dict:
    @contextmanager
    def subject_of(model: Path, **options: Any) -> Iterator[Subject]:
        with booted(model, num_ranks, **options) as engine:
            yield Subject(engine)

    if container not in CONFIGS:  # the engine quantizes the checkpoint itself
        with subject_of(bf16_of(family, 2, work), quantization=container) as subject:
            own = {"own": subject.state()}
        other = subject_of(bf16_of(family, 2, work), quantization=container)
        return try_container(other, subject_of, family, work) | own
    overrides = json.dumps({"quantization_config": CONFIGS[container]})
    noise = subject_of(bf16_of(family, 2, work), load_format="dummy", json_model_override_args=overrides)
    return try_container(noise, subject_of, family, work)
