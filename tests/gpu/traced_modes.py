"""What `run_traced.py` does in each of its modes."""

import argparse
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import policies
import torch
from experts_engines import ENGINES, quantization
from kv_engines import versions
from measuring import log, timed_refit
from safetensors.torch import save_file
from torch import Tensor

from fp8refit import Refitter
from fp8refit.kernels.reference import quantize_reference
from fp8refit.live.layout import EngineLayout

NUM_REFITS = 7
SHARD_BYTES = 2 << 30
GO = "go"
"""A file that `--wait` waits for before anything is timed."""


def run_refit(args) -> dict:
    """From noise through policy 2 to policy 1, tensor by tensor as a checkpoint holds them; then from stacked experts."""
    policies.write_config(args.shape, args.work / "dummy")
    engine = ENGINES[args.engine](args, args.work / "dummy", is_noise=True)
    log("booted")
    places = engine.places()
    while args.wait and not (args.work / GO).exists():
        time.sleep(0.1)
    result: dict = {"compile_s": engine.compile_kernels()}
    stacked = policies.allocate(args.shape)
    single = policies.expert_by_expert(stacked)
    refitter = Refitter(engine.candidate, prove_trace=not args.no_proof)
    policies.fill_policy(stacked, 2)
    result["first_refit"] = timed_refit(refitter, single)
    log(f"first refit: {result['first_refit']}")
    result["twin"] = engine.look_at_loader()
    log(f"twin: {result['twin']}")
    result["later_refits"] = []
    for index in range(NUM_REFITS):
        policies.fill_policy(stacked, 1 + (NUM_REFITS - 1 - index) % 2)  # the last is policy 1
        result["later_refits"].append(timed_refit(refitter, single))
    result["num_tensors"], result["is_proved"] = len(single), not args.no_proof
    result["single"] = engine.observe()
    result["moved"] = places != engine.places()
    layout = refitter.layout()
    result["kernels"] = sorted({(slot.kernel, str(slot.scale_format)) for slot in layout.slots if slot.scale_format})
    log("write a checkpoint")
    write_fp8(args.shape, single, layout, args.work / "fp8")
    log("from stacked experts")
    refitter.refit(policies.fill_policy(stacked, 2))
    refitter.refit(policies.fill_policy(stacked, 1))
    result["stacked"] = engine.observe()
    engine.shutdown()
    return result


def run_fresh(args) -> dict:
    engine = ENGINES[args.engine](args, args.work / "fp8")
    log("booted")
    found = engine.observe()
    engine.shutdown()
    return {"fresh": found}


def run_held(args) -> dict:
    """What the model of a noise engine holds beside its parameters, after its boot and after its first forward."""
    import held_cost

    policies.write_config(args.shape, args.work / "dummy")
    engine = ENGINES[args.engine](args, args.work / "dummy", is_noise=True)
    log("booted")
    found = {"after_boot": engine.look_at_held()}
    engine.observe()
    found["after_forward"] = engine.look_at_held()
    for name, looked in found.items():
        print(f"=== {args.engine} {args.shape} {name}")
        held_cost.show(looked)
    engine.shutdown()
    return found


def write_fp8(shape: str, policy: dict[str, Tensor], layout: EngineLayout, folder: Path) -> None:
    """The block-FP8 checkpoint of a policy, by the specification in torch: what an engine boots from that no refit wrote to."""
    policies.write_config(shape, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | quantization(shape)))
    formats = {slot.name: slot.format for slot in layout.slots if slot.format is not None}
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(4) as pool:
        writing = []
        for index, shard in enumerate(shards_of(policy, formats)):
            file = f"model-{index:05d}.safetensors"
            weight_map |= dict.fromkeys(shard, file)
            writing.append(pool.submit(save_file, shard, folder / file, metadata={"format": "pt"}))
        for future in writing:
            future.result()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def shards_of(policy: dict[str, Tensor], formats: dict) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in policy.items():
        if name in formats:
            codes, scale, _ = quantize_reference(tensor, formats[name])
            shard |= {name: codes.cpu(), f"{name}_scale_inv": scale.cpu()}
        else:
            shard[name] = tensor.cpu().clone()
        if sum(held.nbytes for held in shard.values()) > SHARD_BYTES:
            yield shard
            shard = {}
    yield shard


MODES = {"refit": run_refit, "fresh": run_fresh, "held": run_held}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=list(MODES))
    parser.add_argument("--engine", choices=list(ENGINES), default="vllm")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--attention")
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--no-proof", action="store_true")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.tp, args.ep, args.eager = 1, False, False
    args.work.mkdir(parents=True, exist_ok=True)
    start_s = time.perf_counter()
    result = MODES[args.mode](args)
    result |= {
        "versions": versions(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "seconds": time.perf_counter() - start_s,
    }
    args.out.write_text(json.dumps(result))
    log("done")
    os._exit(0)  # what Python and the engine take down after this takes seconds, and says nothing
