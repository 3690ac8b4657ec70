"""SGLang engines in other containers than DeepSeek's."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drop_ins import from_tensor
from engines import bf16_of, booted
from subject import Subject

from tests.engines.containers import CONFIGS, UNQUANTIZED, try_container
from tests.updating import in_fours


def push(subject: Subject, policy: dict) -> None:
    """A trainer's calls, which the drop-in takes."""
    answers = from_tensor(subject.engine, in_fours(policy), Path())
    assert all(answer["success"] for answer in answers), answers


def run_container(family: str, num_ranks: int, container: str, work: Path) -> dict:
    @contextmanager
    def subject_of(model: Path, **options: Any) -> Iterator[Subject]:
        with booted(model, num_ranks, **options) as engine:
            yield Subject(engine)

    if container not in CONFIGS:  # the engine quantizes the checkpoint itself
        quantization, _, layout = container.partition(", ")
        options = {"quantization": None if quantization == UNQUANTIZED else quantization} | (
            {"ep_size": num_ranks} if layout == "expert parallel" else {}
        )
        with subject_of(bf16_of(family, 2, work), **options) as subject:
            own = {"own": subject.state()}
        os.environ["FP8REFIT_DROP_IN"] = "1"
        other = subject_of(bf16_of(family, 2, work), **options)
        # No checkpoint has what several ranks hold of a row, each with its own scale, or rows beside experts with one scale.
        is_written = num_ranks == 1 and family != "qwen3_moe" and quantization != UNQUANTIZED
        fresh = subject_of if is_written else None
        # The drop-in leaves engines alone that are not quantized.
        pushes = {} if quantization == UNQUANTIZED else {"SGLang's own update": push}
        return try_container(other, fresh, family, work, pushes) | own
    overrides = json.dumps({"quantization_config": CONFIGS[container]})
    noise = subject_of(bf16_of(family, 2, work), load_format="dummy", json_model_override_args=overrides)
    return try_container(noise, subject_of, family, work)
