"""What `run_experts.py` does in each of its modes."""

import argparse
import json
import os
import time
from pathlib import Path

import policies
import torch
from checkpoints import fp8_folder, write_checkpoints
from experts_engines import ENGINES, VllmUnderTest
from kv_engines import versions
from measuring import log, measure_copy_gb_per_s, wait_for_gpu
from torch import Tensor

from fp8refit import Refitter
from fp8refit.kernels.reference import quantize_reference
from fp8refit.live.layout import EngineLayout
from fp8refit.live.slots import Slot

NUM_ROUNDS = 7


def run_refit(args) -> dict:
    """From noise through policy 2 to policy 1, from stacked experts and from single ones; then after its own reload."""
    policies.write_config(args.shape, args.work / "dummy")
    engine = ENGINES[args.engine](args, args.work / "dummy", is_noise=True)
    log("booted")
    result: dict = {"noise": engine.observe()}  # it has made the copies that a first forward makes
    places = engine.places()
    policy, refitter = policies.fill_policy(policies.allocate(args.shape), 2), Refitter(engine.candidate)
    refitter.refit(policy)
    policies.fill_policy(policy, 1)
    report = refitter.refit(policy)
    result |= {"stacked": engine.observe(), "num_tensors": report.num_tensors}
    layout = refitter.layout()
    result["kernels"] = sorted({(slot.kernel, str(slot.scale_format)) for slot in layout.slots if slot.scale_format})
    (args.work / f"layout-{args.name}.json").write_text(layout.model_dump_json())
    write_checkpoints(args.shape, args.work)
    refitter.refit(policies.fill_policy(policy, 2))
    policies.fill_policy(policy, 1)
    report = refitter.refit(policies.expert_by_expert(policy))
    result["single"] = engine.observe() | {"num_tensors": report.num_tensors}
    result["moved"] = places != engine.places()
    log("the engine's own reload")
    engine.reload(fp8_folder(args.work, layout))
    refitter.refit(policies.fill_policy(policy, 2))
    refitter.refit(policies.fill_policy(policy, 1))
    result["after_reload"] = engine.observe()
    engine.shutdown()
    return result


def run_fresh(args) -> dict:
    layout = EngineLayout.model_validate_json((args.work / f"layout-{args.name}.json").read_text())
    engine = ENGINES[args.engine](args, fp8_folder(args.work, layout))
    found = engine.observe()
    engine.shutdown()
    return {"fresh": found}


def run_speed(args) -> dict:
    """Interleaved on one engine and the same CUDA tensors: refits from single and from stacked experts, and vLLM's reload."""
    policies.write_config(args.shape, args.work / "dummy")
    options = {"load_format": "dummy", "quantization": "fp8_per_block", "gpu_memory_utilization": 0.32}
    llm = VllmUnderTest(args, args.work / "dummy", **options).candidate
    log("booted")
    stacked = policies.fill_policy(policies.allocate(args.shape), 1)
    single = policies.expert_by_expert(stacked)
    sources = {"single": single, "stacked": stacked}
    refitter = Refitter(llm)
    result: dict = {"first_refit": timed(refitter, single), "rounds": []}
    result["first_stacked_refit"] = timed(refitter, stacked)
    log("refitted")
    for round_ in range(NUM_ROUNDS):
        policies.fill_policy(stacked, 2 + round_ % 2)
        found: dict = {}
        for kind, source in sources.items():
            refitter.refit(source)  # another layout of the same source compiles its plan anew
            found[kind] = timed(refitter, dict(source))
            found[kind]["wrong_slots"] = count_wrong(refitter, single) if round_ in (0, NUM_ROUNDS - 1) else None
        found["copy_gb_per_s"] = measure_copy_gb_per_s(torch.cuda.current_device())
        torch.cuda.empty_cache()
        wait_for_gpu()
        torch.cuda.reset_peak_memory_stats()
        allocated, start_s = torch.cuda.memory_allocated(), time.perf_counter()
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(single.items())})
        wait_for_gpu()
        found["reload_s"] = time.perf_counter() - start_s
        found["reload_peak_extra_bytes"] = torch.cuda.max_memory_allocated() - allocated
        refitter.refit(single)  # what the reload replaced is read again here
        log(f"round {round_}: {found}")
        result["rounds"].append(found)
    return result


def timed(refitter: Refitter, policy: dict[str, Tensor]) -> dict:
    """Seconds and bytes of one refit, and the most memory that it took."""
    wait_for_gpu()
    torch.cuda.reset_peak_memory_stats()
    allocated, start_s = torch.cuda.memory_allocated(), time.perf_counter()
    report = refitter.refit(policy)
    phases = report.phases_s
    return {
        "wall_s": time.perf_counter() - start_s,
        "s": phases["plan"] + phases["fill"] + phases["verify"],
        "phases_s": phases,
        "fill_device_s": report.fill_device_s,
        "num_bytes": report.bytes_read + report.bytes_written,
        "num_tensors": report.num_tensors,
        "peak_extra_bytes": torch.cuda.max_memory_allocated() - allocated,
    }


def count_wrong(refitter: Refitter, policy: dict[str, Tensor]) -> int:
    """Slots whose live bytes differ from what the torch specification makes of the policy."""
    return sum(not holds(slot, policy[slot.name]) for slot in refitter._engine.ranks._rank.target.live.inventory.slots)


def holds(slot: Slot, source: Tensor) -> bool:
    if not slot.is_quantized:
        return torch.equal(source.to(slot.weight.dtype), slot.weight)
    codes, scale, _ = quantize_reference(source, slot.format)
    return torch.equal(codes.view(torch.uint8), slot.weight.view(torch.uint8)) and torch.equal(scale, slot.scale)


MODES = {"refit": run_refit, "fresh": run_fresh, "speed": run_speed}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=list(MODES))
    parser.add_argument("--engine", choices=list(ENGINES), default="vllm")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--name", default="speed")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--attention")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
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
