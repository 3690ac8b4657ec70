"""One engine of a model with experts or latent attention, or of a whole model.

    refit    a noise engine, refitted to policy 1 from stacked experts and from single ones, and after its own reload
    fresh    boots from the FP8 checkpoint that `refit` or `traced` wrote
    traced   a noise engine's first refit, and what looking at its loader costs; writes a checkpoint by the specification
    held     prints what an engine's model holds beside its parameters

vLLM's driver is in this process: else requests reach the scheduler one by one, and what is batched with what, which the last
bits depend on, is chance; and what a refit leaves behind can be looked at.
"""

from pathlib import Path
from typing import Any

import model_costs
import policies
from checkpoints import fp8_folder, kernels_of, write_checkpoints, write_layout, write_specified
from harness import FLAG, WHOLE, log
from live_engines import HAS_GPU, Engine, Sglang, Vllm

from fp8refit import Refitter

ROOM = {"gpu_memory_utilization": 0.12, "kv_cache_memory_bytes": 2 << 30}
"""vLLM profiles nothing, so that engines on one GPU can start and end beside one another."""
FEW_TOKENS = {"mem_fraction_static": 0.5, "max_total_tokens": 8192}
"""SGLang holds what is free against the fraction, and engines beside it change that; its KV cache has these tokens."""
NCCL_ALONE = {"disable_custom_all_reduce": True, "enforce_disable_flashinfer_allreduce_fusion": True}
"""SGLang compiles its other sums over ranks at their first use, from sources that not every host has."""


def boot(args, model: Path, **options: Any) -> Engine:
    if args.attention:
        options["attention_backend"] = args.attention
    if args.engine == "vllm":
        own = {"tensor_parallel_size": args.tp, "enable_expert_parallel": args.ep, "enforce_eager": args.eager}
        return Vllm(model, is_inside=True, **ROOM | own | options)
    own = {"tp_size": args.tp, "ep_size": args.tp if args.ep else 1, **FEW_TOKENS}
    if HAS_GPU:
        own |= NCCL_ALONE | {"disable_cuda_graph": args.eager}
    return Sglang(model, **own | options)


def boot_noise(args) -> Engine:
    policies.write_config(args.shape, args.work / "dummy")
    return boot(args, args.work / "dummy", is_noise=True)


def run_refit(args) -> dict:
    """From noise through policy 2 to policy 1, from stacked experts and from single ones; then after its own reload."""
    engine = boot_noise(args)
    result: dict = {"noise": engine.observe()}  # it has made the copies that a first forward makes
    places = engine.ask("places")
    policy, refitter = policies.allocate(args.shape), Refitter(engine.candidate)
    refitter.refit(policies.fill_policy(policy, 2))
    report = refitter.refit(policies.fill_policy(policy, 1))
    result |= {"stacked": engine.observe(), "num_tensors": report.num_tensors}
    layout = refitter.layout()
    result["kernels"] = kernels_of(layout)
    write_layout(layout, args.work, args.name)
    write_checkpoints(args.shape, args.work)
    refitter.refit(policies.fill_policy(policy, 2))
    report = refitter.refit(policies.expert_by_expert(policies.fill_policy(policy, 1)))
    result["single"] = engine.observe() | {"num_tensors": report.num_tensors}
    result["moved"] = places != engine.ask("places")
    log("the engine's own reload")
    engine.reload(fp8_folder(args.work, args.name))
    refitter.refit(policies.fill_policy(policy, 2))
    refitter.refit(policies.fill_policy(policy, 1))
    result["after_reload"] = engine.observe()
    engine.shutdown()
    return result


def run_fresh(args) -> dict:
    engine = boot(args, fp8_folder(args.work, args.name))
    found = engine.observe()
    engine.shutdown()
    return {"fresh": found}


def run_traced(args) -> dict:
    """From noise through policy 2 to policy 1, tensor by tensor as a checkpoint holds them; then from stacked experts."""
    engine = boot_noise(args)
    places = engine.ask("places")
    result: dict = {}
    stacked = policies.allocate(args.shape)
    single = policies.expert_by_expert(stacked)
    refitter = Refitter(engine.candidate)
    policies.fill_policy(stacked, 2)
    refitter.refit(single)
    result["twin"] = engine.ask("loader")[0]
    log(f"twin: {result['twin']}")
    policies.fill_policy(stacked, 1)
    refitter.refit(single)
    result["num_tensors"] = len(single)
    result["single"] = engine.observe()
    result["moved"] = places != engine.ask("places")
    layout = refitter.layout()
    result["kernels"] = kernels_of(layout)
    log("write a checkpoint")
    write_layout(layout, args.work, args.name)
    write_specified(args.shape, single, layout, fp8_folder(args.work, args.name))
    log("from stacked experts")
    refitter.refit(policies.fill_policy(stacked, 2))
    refitter.refit(policies.fill_policy(stacked, 1))
    result["stacked"] = engine.observe()
    engine.shutdown()
    return result


def run_held(args) -> dict:
    """What the model of a noise engine holds beside its parameters, after its boot and after its first forward."""
    engine = boot_noise(args)
    found = {"after_boot": engine.ask("held")[0]}
    engine.observe()
    found["after_forward"] = engine.ask("held")[0]
    for name, looked in found.items():
        print(f"=== {args.engine} {args.shape} {name}")
        model_costs.show(looked)
    engine.shutdown()
    return found


OPTIONS = {
    "engine": {"choices": ["vllm", "sglang"], "default": "vllm"},
    "name": {"default": "engine", "help": "of its layout, by which `fresh` finds its checkpoint"},
    "tp": WHOLE,
    "ep": FLAG,
    "eager": FLAG,
    "attention": {},
}
MODES = {"refit": run_refit, "fresh": run_fresh, "traced": run_traced, "held": run_held}
