"""What refitted engines are compared with: checkpoints of policy 1 that others boot from, and the specification in torch."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import policies
import torch
from harness import log
from safetensors.torch import save_file
from torch import Tensor

from fp8refit import Refitter
from fp8refit.bench.shapes import block_fp8
from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.kernels.placement import codes_in_rows, scales_in_rows
from fp8refit.kernels.reference import (
    block_scales,
    global_scale_of,
    put_two_levels,
    quantize_reference,
    quantize_two_levels,
)
from fp8refit.live.layout import EngineLayout
from fp8refit.live.slots import Slot

SHARD_BYTES = 2 << 30


def kernels_of(layout: EngineLayout) -> list[tuple[str, str]]:
    """Of an engine, each with its scale format."""
    return sorted({(slot.kernel, str(slot.scale_format)) for slot in layout.slots if slot.scale_format})


def write_layout(layout: EngineLayout, work: Path, name: object) -> None:
    """For `write_checkpoints` and `fp8_folder`."""
    (work / f"layout-{name}.json").write_text(layout.model_dump_json())


def write_checkpoints(shape: str, work: Path, policy: dict[str, Tensor] | None = None) -> None:
    """Quantize policy 1, on the GPU of this process, for every engine that left its layout in `work`."""
    folder = work / "bf16"
    if not (folder / "config.json").exists():
        policy = policies.fill_policy(policies.allocate(shape), 1) if policy is None else policy
        write_shards(policies.expert_by_expert(policy).items(), folder)
        policies.write_config(shape, folder)
    for file in sorted(work.glob("layout-*.json")):
        fp8 = fp8_folder(work, file.stem.removeprefix("layout-"))
        if not fp8.exists():
            log(f"write {fp8.name}")
            quantize_checkpoint(folder, fp8, like=EngineLayout.model_validate_json(file.read_text()))


def fp8_folder(work: Path, name: object) -> Path:
    """Of an engine. Those whose kernels want the same scale formats boot from the same checkpoint."""
    layout = EngineLayout.model_validate_json((work / f"layout-{name}.json").read_text())
    formats = sorted((slot.name, str(slot.scale_format)) for slot in layout.slots)
    return work / f"fp8-{hashlib.sha256(repr(formats).encode()).hexdigest()[:12]}"


def write_specified(shape: str, policy: dict[str, Tensor], layout: EngineLayout, folder: Path) -> None:
    """The block-FP8 checkpoint of a policy, by the specification in torch: what an engine boots from that no refit wrote to."""
    policies.write_config(shape, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": block_fp8(folder)}))
    write_shards(as_specified(policy, layout), folder)


def as_specified(policy: dict[str, Tensor], layout: EngineLayout) -> Iterator[tuple[str, Tensor]]:
    formats = {slot.name: slot.format for slot in layout.slots if slot.format is not None}
    for name, tensor in policy.items():
        if name in formats:
            codes, scale, _ = quantize_reference(tensor, formats[name])
            yield name, codes
            yield f"{name}_scale_inv", scale
        else:
            yield name, tensor


def slots_of(refitter: Refitter) -> tuple[Slot, ...]:
    """Of the rank in this process."""
    return refitter._engine.ranks.rank.target.live.inventory.slots


def count_wrong(refitter: Refitter, policy: dict[str, Tensor]) -> int:
    """Slots whose live bytes differ from what the torch specification makes of the policy."""
    slots = slots_of(refitter)
    maxima: dict[tuple[int, int], Tensor] = {}
    for slot in slots:
        if slot.group is not None:
            maximum = policy[slot.name].abs().amax().float()
            maxima[slot.group] = torch.maximum(maximum, maxima.get(slot.group, maximum))
    return sum(not _holds(slot, policy[slot.name], maxima.get(slot.group)) for slot in slots)


def _holds(slot: Slot, source: Tensor, maximum: Tensor | None) -> bool:
    if not slot.is_quantized:
        return torch.equal(source.to(slot.weight.dtype), slot.weight)
    if slot.global_scale is not None:
        return _holds_two_levels(slot, source, maximum.reshape(1))
    shared = None if maximum is None else block_scales(maximum, slot.format)
    codes, scale, _ = quantize_reference(source, slot.format, shared)
    weight, scales = slot.weight, slot.scale
    if slot.format.is_tiled:
        weight, scales = codes_in_rows(weight), scales_in_rows(scales)
    return torch.equal(codes.view(torch.uint8), weight.view(torch.uint8)) and torch.equal(scale, scales)


def _holds_two_levels(slot: Slot, source: Tensor, maximum: Tensor) -> bool:
    """On one rank, which holds all of the weight."""
    over_all = global_scale_of(maximum, slot.format.scale_format)
    codes, scales = quantize_two_levels(source, slot.format, over_all)
    live = slot.weight, slot.scale, slot.global_scale
    made = tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in live)
    put_two_levels(*made, (codes, scales, over_all), slot.format.placement, maximum)
    pairs = zip(live[:2], made[:2], strict=True)
    are_equal = all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)
    return are_equal and torch.equal(live[2], made[2])


def write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Several files and their index, of tensors that are taken one by one."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(4) as pool:
        writing = []
        for index, shard in enumerate(_shards(tensors)):
            file = f"model-{index:05d}.safetensors"
            weight_map |= dict.fromkeys(shard, file)
            writing.append(pool.submit(save_file, shard, folder / file, metadata={"format": "pt"}))
        for future in writing:
            future.result()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        shard[name] = tensor.to("cpu", copy=True).contiguous()
        if sum(held.nbytes for held in shard.values()) > SHARD_BYTES:
            yield shard
            shard = {}
    yield shard
