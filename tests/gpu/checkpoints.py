"""Checkpoints of policy 1 that engines boot from, to be compared with refitted ones."""

import hashlib
from pathlib import Path

import policies
from measuring import log
from safetensors.torch import save_file

from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.live.layout import EngineLayout


def write_checkpoints(shape: str, work: Path) -> None:
    """Quantize policy 1, on the GPU of this process, for every engine that left its `layout-*.json` in `work`."""
    file = work / "bf16" / "model.safetensors"
    if not file.exists():
        policy = policies.fill_policy(policies.allocate(shape), 1)
        policies.write_config(shape, work / "bf16")
        tensors = policies.expert_by_expert(policy)
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    for file in sorted(work.glob("layout-*.json")):
        layout = EngineLayout.model_validate_json(file.read_text())
        folder = fp8_folder(work, layout)
        if not folder.exists():
            log(f"write {folder.name}")
            quantize_checkpoint(work / "bf16", folder, like=layout)


def fp8_folder(work: Path, layout: EngineLayout) -> Path:
    """Engines whose kernels want the same scale formats boot from the same checkpoint."""
    formats = sorted((slot.name, str(slot.scale_format)) for slot in layout.slots)
    return work / f"fp8-{hashlib.sha256(repr(formats).encode()).hexdigest()[:12]}"
