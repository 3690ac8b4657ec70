"""Engines that draft tokens, booted from FP8 checkpoints: one moved to another policy, and one that boots with it."""

import json
from pathlib import Path
from typing import Any

from engines import booted, generate, state
from subject import Subject

from fp8refit.checkpoint import quantize_checkpoint
from tests.engines.drafts import FAMILIES, save_drafting, try_drafting

ALGORITHMS = {"draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}
"""SGLang's; NEXTN for the others."""


def run_drafting(method: str, num_ranks: int, work: Path) -> dict:
    """What both found; of the second nothing that fp8refit did."""
    folder = work / f"drafting-{method}"
    save_drafting(method, str(folder))
    for bf16 in list(folder.iterdir()):
        if not (method.startswith("eagle") and bf16.name.startswith("draft")):  # published ones are BF16
            quantize_checkpoint(bf16, folder / f"{bf16.name}-fp8")
    with booted(folder / "policy-2-fp8", num_ranks, **options_of(method, folder, 2)) as engine:
        generate(engine)  # SGLang's first forward makes copies, and gives second names
        fresh = state(engine)
    with booted(folder / "policy-1-fp8", num_ranks, **options_of(method, folder, 1)) as engine:
        generate(engine)
        return {"found": try_drafting(Subject(engine), method, folder), "fresh": fresh}


def options_of(method: str, folder: Path, seed: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "speculative_algorithm": ALGORITHMS.get(method, "NEXTN"),
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 3,
    }
    if method in FAMILIES:
        options["json_model_override_args"] = json.dumps(
            {"num_nextn_predict_layers": 1}
        )  # as published configs have it
    else:
        quantized = folder / f"draft-{seed}-fp8"
        options["speculative_draft_model_path"] = str(quantized if quantized.exists() else folder / f"draft-{seed}")
    return options
