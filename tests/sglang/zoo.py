"""Any model that SGLang names and that transformers can make small: refitted from noise, against a fresh engine.

The fresh one loads the block-FP8 checkpoint that `fp8refit quantize --like` writes, whose tensors are those of a second
quantizer. Where no such checkpoint boots, and `quantize` says so, it loads the BF16 checkpoint, and what it holds is quantized
here.
"""

from pathlib import Path
from typing import Any

from engines import NOISE, boot, generate, look
from safetensors.torch import load_file

from fp8refit import CheckpointError, InvalidSourceError, Refitter
from fp8refit.checkpoint import quantize_checkpoint
from tests import zoo_models, zoo_vision
from tests.zoo_table import Stage, check_is_small

OPTIONS = {"disable_overlap_schedule": True, "enable_multimodal": False}
"""With overlap, hybrids want snapshots of states, which SGLang takes on GPUs alone. No tiny model has an image processor."""


def run_zoo(architecture: str, work: Path, notes: str, *, speaks: bool) -> dict:
    """What two engines hold and say.

    Args:
        architecture: A class of transformers'.
        work: For checkpoints.
        notes: A file, for the stage that begins.
        speaks: Whether there are kernels for a forward of it on this CPU: without one, an engine ends.
    """
    begin = Path(notes).write_text
    begin(Stage.MAKE)
    check_is_small(architecture)
    folder = work / f"zoo-{architecture}"
    policies = zoo_vision.policies_of(architecture, folder / "bf16")
    begin(Stage.BOOT)
    engine = boot(folder / "bf16", **NOISE, **OPTIONS)
    begin(Stage.LOOK)
    refitter = Refitter(engine, keep=policies.keep)
    before = look(engine, "process_state")
    layout = refitter.layout()
    after = look(engine, "process_state")
    found: dict[str, Any] = {
        "left_behind": [name for old, new in zip(before, after, strict=True) for name in old if old[name] != new[name]]
    }
    if layout.refusals:
        engine.shutdown()
        return found | {"refused": layout.refusals[0]}
    begin(Stage.FIRST_REFIT)
    try:
        refitter.refit(policies.first)
    except InvalidSourceError as error:  # SGLang would drop tensors of this checkpoint
        if error.written:
            raise
        engine.shutdown()
        return found | {"refused": error.problems[0]}
    begin(Stage.FIRST_FORWARD)
    found["before"] = generate(engine) if speaks else None
    begin(Stage.REFIT)
    refitter.refit(policies.second)
    found["refitted"] = look(engine, "live_bytes")
    found["generated"] = generate(engine) if speaks else None
    look(engine, "scribble")
    begin(Stage.FROM_FILES)
    refitter.refit(folder / "bf16")
    found["from_files"] = look(engine, "live_bytes")
    if architecture in zoo_vision.EXPERT_BY_EXPERT:
        refitter.refit(policies.first)
        refitter.refit(zoo_vision.expert_by_expert(policies.second))
        found["from_experts"] = look(engine, "live_bytes")
    engine.shutdown()
    begin(Stage.QUANTIZE)
    try:
        quantize_checkpoint(folder / "bf16", folder / "like", like=layout)
    except CheckpointError as error:
        begin(Stage.FRESH_BOOT)
        return found | {"fresh": loaded_and_quantized(folder, found["refitted"][0]), "no_checkpoint": error.problems}
    zoo_models.save_block_fp8(folder / "bf16", folder / "fp8", zoo_models.quantized_in(layout), layout.written_as)
    found["is_quantized_alike"] = zoo_models.hashes_in(folder / "like") == zoo_models.hashes_in(folder / "fp8")
    begin(Stage.FRESH_BOOT)
    engine = boot(folder / "like", **OPTIONS)
    found["fresh_generated"] = generate(engine) if speaks else None  # a first forward gives some tensors a second name
    found["fresh"] = look(engine, "live_bytes")
    engine.shutdown()
    return found


def loaded_and_quantized(folder: Path, live: dict[str, str]) -> list[dict[str, str]]:
    """A sha256 for each tensor of `live`, of what SGLang's loader makes of the BF16 checkpoint."""
    engine = boot(folder / "bf16", **OPTIONS)
    look(engine, "save", str(folder))
    engine.shutdown()
    loaded = load_file(folder / "0.safetensors")
    quantized = {name: zoo_models.quantize(loaded[name]) for name in loaded if f"{name}_scale_inv" in live}
    expected = loaded | {name: codes for name, (codes, _) in quantized.items()}
    expected |= {f"{name}_scale_inv": scale for name, (_, scale) in quantized.items()}
    return [{name: zoo_models.hash_of(expected[name]) if name in expected else "not there" for name in live}]
