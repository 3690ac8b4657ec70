"""BF16 engines of the rollout benchmark: one that loaded its policy, and one that boots from the policy of an FP8 engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fp8refit import Refitter
from fp8refit.bench import Precision, policies, write_config
from fp8refit.bench.rollout_engine import RolloutBoot, RolloutEngine

SEED = 3


def held_by_both(
    folder: Path, boot: Callable[[RolloutBoot], RolloutEngine], observe: Callable[[Any], object], **arguments: Any
) -> dict[str, object]:
    """What they hold.

    Args:
        folder: For the model.
        boot: The adapter's.
        observe: Looks at an engine's `candidate`.
        arguments: The engine's own, for all boots.
    """

    def booted(precision: Precision, **others: Any) -> RolloutEngine:
        options = {"model": folder, "tp": 1, "precision": precision, "max_length": 64, "max_batch": 2}
        return boot(RolloutBoot(**options, arguments=arguments | others))

    write_config("tiny", folder)
    engine = booted(Precision.BF16)
    found = {"booted": observe(engine.candidate)}
    engine.load_bf16(SEED)
    engine.generate([[101, 102, 103]], 2)
    found["loaded"] = observe(engine.candidate)
    engine.close()
    engine = booted(Precision.FP8)
    policy = policies.stream(policies.manifest(Refitter(engine.candidate).layout()), SEED, torch.device("cpu"))
    save_file(dict(policy), folder / "model.safetensors", metadata={"format": "pt"})
    engine.close()
    engine = booted(Precision.BF16, load_format="auto")
    found["fresh"] = observe(engine.candidate)
    engine.close()
    return found
