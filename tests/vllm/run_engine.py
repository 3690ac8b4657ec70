"""Real vLLM engines in this process, doing what the tests beside it ask. The result is a JSON file.

`start_scenarios.py` runs `main`. A scenario is a JSON file too: {"name": "refit", "arguments": {...}}.

vLLM compiles its block cast and its power-of-two requantization; here they run eagerly: without a GPU the compiled ones
would be other code anyway, and compiling takes a minute.
"""

import faulthandler
import json
from functools import partial
from importlib import import_module
from pathlib import Path

import cpu_kernel
import torch
from attacked import run_oracle
from broadcast import run_broadcast
from conformance import run_conformance
from containers import run_container
from core_loop import run_core_loop
from custom_loaders import LOADERS, booted_with
from dirty_engines import run_dirty_async, run_trainer_errors
from drafts import run_drafting, run_drafts, run_fresh_drafting, run_fresh_drafts
from drop_ins import (
    run_drop_in,
    run_drop_in_boot,
    run_drop_in_fresh,
    run_drop_in_fresh_ranks,
    run_drop_in_going_on,
    run_drop_in_refused,
)
from engines import (
    booted,
    booted_dummy,
    generate,
    kv_scales,
    live_bytes,
    make_policy,
    model_of,
    num_padding_bytes_set,
    refused,
    scribble,
    state,
    wrong_tensors,
)
from experts import run_expert_ranks, run_experts, run_fresh_experts
from fp8refit_vllm import rollout
from kept_copies import run_gates, run_joined, run_packed_head, run_sinks
from killed import run_killed
from kv_cache import run_kv_cache
from latent import run_fresh_latent, run_latent, run_latent_cache
from layouts import run_fresh_layout, run_layout
from live_engine import run_live
from lora import run_adapters, run_fresh_adapters, run_fresh_lora, run_lora
from moved_experts import run_fresh_moved_experts, run_moved_experts, run_moved_formats
from precision_runs import run_precision
from ray_actors import run_ray, run_ray_executor
from replicas import run_explore, run_replicas
from served import run_served
from updates import run_updates
from vllm.model_executor.models import registry
from zoo import run_zoo

from fp8refit import Refitter
from fp8refit.bench import Precision, RefitBenchConfig, RolloutBenchConfig, run_refit_bench
from fp8refit.bench.rollout import _refit
from fp8refit.bench.rollout_engine import RolloutBoot
from fp8refit.checkpoint import quantize_checkpoint
from tests import cross_engine, rollout_engines, zoo_models
from tests.engines.drafts import save_drafting
from tests.engines.scripts import run_script
from tests.tiny_models import add_small_blocks, save_model


def run_refit(cases: list, work: str) -> dict:
    """Dummy engines, each moved to policy 1 and then to policy 2."""
    return {f"{family}-{kernel}": refit_dummy(family, kernel, Path(work)) for family, kernel in cases}


def refit_dummy(family: str, kernel: str, work: Path) -> dict:
    # Not later: booting changes the models of transformers that it serves itself.
    first, policy = make_policy(family, 1), make_policy(family, 2)
    with booted_dummy(work / f"{family}-bf16", kernel) as llm:
        found = {"booted_kv_scales": kv_scales(llm), "booted_padding": num_padding_bytes_set(llm)}
        refitter = Refitter(llm)
        refitter.refit(first)
        found["before"], found["before_again"] = generate(llm), generate(llm)
        report = refitter.refit(policy)
        found |= {
            "live": live_bytes(llm),
            "wrong": wrong_tensors(llm, policy, kernel),
            "generated": generate(llm),
            "kv_scales": kv_scales(llm),
            "padding": num_padding_bytes_set(llm),
            "ignored": report.ignored,
            "untied": refused(refitter.refit, policy | {name: policy[name] + 1 for name in report.ignored}),
            "layout": refitter.layout().model_dump(mode="json"),
            "class": type(model_of(llm)).__module__,
        }
        scribble(llm)
        saved = {name: policy[name] for name in policy if name not in report.ignored}
        refitter.refit(saved)
        found["live_without_ignored"] = live_bytes(llm)
        others = {name: alias for alias, name in refitter.layout().aliases.items() if alias not in report.ignored}
        scribble(llm)
        refitter.refit({others.get(name, name): tensor for name, tensor in saved.items()})
        return found | {"renamed": len(others.keys() & saved.keys()), "live_renamed": live_bytes(llm)}


def run_fresh(cases: list, work: str) -> dict:
    """Engines that load the block-FP8 checkpoints of policy 2. No fp8refit in them."""
    found = {}
    for family, kernel in cases:
        with booted(Path(work) / f"{family}-{kernel}", kernel) as llm:
            found[f"{family}-{kernel}"] = {
                "generated": generate(llm),
                "live": live_bytes(llm),
                "kv_scales": kv_scales(llm),
            }
    return found


def run_online(kernel: str, work: str) -> dict:
    """Engines that quantize a BF16 checkpoint as they load it: policy 2 by vLLM's own cast, policy 1 and then our refit."""
    first, second = Path(work) / "policy-1", Path(work) / "policy-2"
    save_model("qwen3", 1, first)
    policy = save_model("qwen3", 2, second, change=add_small_blocks).state_dict()
    scale_format = "fp32_floored" if kernel == "fp32" else kernel
    with booted(second, kernel, quantization="fp8_per_block") as llm:
        found = {"own": live_bytes(llm)}
    with booted(first, kernel, quantization="fp8_per_block") as llm:
        found["booted"] = live_bytes(llm)
        refitter = Refitter(llm)
        refitter.refit(policy)
        found |= {"refitted": live_bytes(llm), "wrong": wrong_tensors(llm, policy, scale_format)}
        found["verified"] = refitter.verify(policy).is_equal
        layout = refitter.layout()
        llm.collective_rpc("reload_weights")
        found["reloaded"] = live_bytes(llm)
        refitter.refit(policy)
        found["refitted_after_reload"] = live_bytes(llm)
        module = model_of(llm).model.layers[0].self_attn.o_proj
        old, module.weight = module.weight, torch.nn.Parameter(torch.zeros_like(module.weight), requires_grad=False)
        module.weight_scale_inv = torch.nn.Parameter(torch.zeros_like(module.weight_scale_inv), requires_grad=False)
        with torch.no_grad():
            old.view(torch.uint8).fill_(0x55)
        refitter.refit(policy)
        found["refitted_after_replacement"] = live_bytes(llm)
        found["replaced_is_left_alone"] = bool((old.view(torch.uint8) == 0x55).all())
    quantize_checkpoint(second, Path(work) / "like", like=layout)
    with booted(Path(work) / "like", kernel) as llm:
        return found | {"like": live_bytes(llm)}


def run_head_bias(work: str) -> dict:
    """Phi, whose head gets its bias while vLLM loads: an engine of policy 2, and one of policy 1 refitted to it."""
    folders = [Path(work) / f"phi-{seed}" for seed in (1, 2)]
    for seed, folder in enumerate(folders, start=1):
        zoo_models.save(zoo_models.make("PhiForCausalLM", seed), folder)
    policy = zoo_models.make("PhiForCausalLM", 2).state_dict()
    with booted(folders[1], "fp32", quantization="fp8_per_block") as llm:
        found = {"fresh": live_bytes(llm)}
    with booted(folders[0], "fp32", quantization="fp8_per_block") as llm:
        found["booted"] = live_bytes(llm)
        Refitter(llm).refit(policy)
        return found | {"refitted": live_bytes(llm)}


def run_bench(**asked) -> dict:
    """The benchmark of refits, on an engine that it boots itself."""
    if asked.get("place", "inside") == "inside":
        cpu_kernel.register("fp32")
    config = RefitBenchConfig(**{"engine": "vllm", "model": "tiny", "rounds": 2, "warm_up": 0} | asked)
    return run_refit_bench(config).model_dump(mode="json")


def run_rollouts(work: str) -> dict:
    """Engines of the benchmark of rollouts, in processes of their own."""

    def observe(llm) -> dict:
        (rank,) = llm.collective_rpc("observe", args=("live_bytes",))
        return rank["found"]

    options = {"dtype": "bfloat16", "num_gpu_blocks_override": 64}
    found = rollout_engines.held_by_both(Path(work) / "model", rollout.boot, observe, **options)
    precision = Precision.PER_CHANNEL
    wanted = {"model": Path(work) / "model", "tp": 1, "precision": precision, "max_length": 64, "max_batch": 2}
    engine = rollout.boot(RolloutBoot(**wanted, arguments=options))
    held = _refit(engine, RolloutBenchConfig(engine="vllm", model="tiny", context_lengths=(8,)), precision)
    engine.generate([[101, 102, 103]], 2)
    found["formats"] = sorted({str(slot.format) for slot in held.slots if slot.format is not None})
    engine.close()
    return found


def run_cross_engine(work: str) -> dict:
    """The digest of what an engine holds that is refitted to the policy of `tests/cross_engine.py`."""
    folder = Path(work) / "model"
    save_model(cross_engine.FAMILY, 1, folder)
    with booted_dummy(folder, "fp32") as llm:
        Refitter(llm).refit(cross_engine.make_policy())
        return {"digest": cross_engine.digest_of(cross_engine.as_checkpoint(model_of(llm).state_dict()))}


def run_refusals(work: str) -> dict:
    """Engines with layers that cannot be written in place."""
    bf16, moe = Path(work) / "bf16", Path(work) / "moe"
    save_model("qwen3", 1, bf16)
    save_model("qwen3_moe", 1, moe)
    engines = {
        "repacking kernel": booted_dummy(bf16, "repacking"),
        "repacked experts": booted_dummy(moe, "repacking"),
        **{loader: booted_with(loader, bf16) for loader in LOADERS},
    }
    found = {}
    for kind, engine in engines.items():
        with engine as llm:
            before = state(llm)
            refitter = Refitter(llm)
            found[kind] = {"refit": refused(refitter.refit, make_policy("qwen3", 2)), "dirty": refitter.is_dirty}
            llm.reset_prefix_cache()
            layout = refitter.layout()
            found[kind] |= {
                "untouched": state(llm) == before,
                "refusals": layout.refusals,
                "is_proved": layout.is_proved,
            }
    return found


def run_transfer(name: str, **asked) -> dict:
    """Imported here: not every version of vLLM has what a trainer of ours is made of."""
    return getattr(import_module("weight_transfer"), name)(**asked)


SCENARIOS = {
    "refit": run_refit,
    "fresh": run_fresh,
    "experts": run_experts,
    "fresh experts": run_fresh_experts,
    "expert ranks": run_expert_ranks,
    "moved experts": run_moved_experts,
    "moved formats": run_moved_formats,
    "fresh moved experts": run_fresh_moved_experts,
    "lora": run_lora,
    "fresh lora": run_fresh_lora,
    "adapters": run_adapters,
    "fresh adapters": run_fresh_adapters,
    "core loop": run_core_loop,
    "drafts": run_drafts,
    "fresh drafts": run_fresh_drafts,
    "save drafting": save_drafting,
    "drafting": run_drafting,
    "fresh drafting": run_fresh_drafting,
    "online": run_online,
    "head bias": run_head_bias,
    "precision": run_precision,
    "live": run_live,
    "served": run_served,
    "oracle": run_oracle,
    "replicas": run_replicas,
    "explore": run_explore,
    "updates": run_updates,
    "killed": run_killed,
    "drop-in": run_drop_in,
    "drop-in going on": run_drop_in_going_on,
    "drop-in boot": run_drop_in_boot,
    "drop-in fresh": run_drop_in_fresh,
    "drop-in fresh ranks": run_drop_in_fresh_ranks,
    "drop-in refused": run_drop_in_refused,
    "trainer errors": run_trainer_errors,
    "dirty async": run_dirty_async,
    "ray": run_ray,
    "ray executor": run_ray_executor,
    "broadcast": run_broadcast,
    "weight transfer": partial(run_transfer, "run_weight_transfer"),
    "served transfer": partial(run_transfer, "run_served_transfer"),
    "kv cache": run_kv_cache,
    "bench": run_bench,
    "rollouts": run_rollouts,
    "cross engine": run_cross_engine,
    "refusals": run_refusals,
    "latent": run_latent,
    "fresh latent": run_fresh_latent,
    "latent cache": run_latent_cache,
    "container": run_container,
    "layout": run_layout,
    "fresh layout": run_fresh_layout,
    "conformance": run_conformance,
    "zoo": run_zoo,
    "script": run_script,
    "joined copies": run_joined,
    "packed head": run_packed_head,
    "sinks": run_sinks,
    "joined gates": run_gates,
}


TAKE_NOTES = ("layout", "fresh layout")
"""Scenarios that may not live to give a result: they write down what they found before."""


def main(scenario: Path, result: Path) -> None:
    torch.compiler.set_stance("force_eager")
    registry._run_in_subprocess = lambda look: look()  # for the sake of CUDA; each would import vLLM
    faulthandler.dump_traceback_later(100)  # into the log: what hangs is ended soon after
    asked = json.loads(scenario.read_text())

    def note(found: dict) -> None:
        result.write_text(json.dumps(found))

    notes = {"note": note} if asked["name"] in TAKE_NOTES else {}
    note(SCENARIOS[asked["name"]](**asked["arguments"], **notes))
