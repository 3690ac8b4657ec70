"""Real vLLM engines in this process, doing what the tests beside it ask. The result is a JSON file.

    python run_engine.py SCENARIO.json RESULT.json      {"name": "refit", "arguments": {...}}

vLLM compiles its block cast and its power-of-two requantization; here they run eagerly: without a GPU the compiled ones
would be other code anyway, and compiling takes a minute.
"""

import json
import sys
import time
from pathlib import Path

import torch
from engines import (
    PROMPTS,
    SAMPLING,
    booted,
    booted_dummy,
    generate,
    kv_scales,
    live_bytes,
    model_of,
    num_padding_bytes_set,
    places,
    said,
    scribble,
    wrong_tensors,
)

from fp8refit import RefitError, Refitter
from fp8refit.checkpoint import quantize_checkpoint
from tests.tiny_models import make_model, save_model

UP_PROJ = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


def make_policy(family: str, seed: int) -> dict[str, torch.Tensor]:
    """What a trainer's `state_dict` gives: for tied models the LM head too."""
    return make_model(family, seed).state_dict()


def refused(call, *arguments) -> dict | None:
    """Which error `call` raises, how soon, and what it names; None if it returns."""
    start_s = time.perf_counter()
    try:
        call(*arguments)
    except RefitError as error:
        named = [getattr(error, field, ()) for field in ("names", "problems", "reasons")]
        return {
            "error": type(error).__name__,
            "message": str(error),
            "named": [line for lines in named for line in lines],
            "seconds": time.perf_counter() - start_s,
        }
    return None


def run_refit(cases: list, work: str) -> dict:
    """Dummy engines, each moved to policy 1 and then to policy 2."""
    return {f"{family}-{kernel}": refit_dummy(family, kernel, Path(work)) for family, kernel in cases}


def refit_dummy(family: str, kernel: str, work: Path) -> dict:
    policy = make_policy(family, 2)
    with booted_dummy(work / f"{family}-bf16", kernel) as llm:
        found = {"booted_kv_scales": kv_scales(llm), "booted_padding": num_padding_bytes_set(llm)}
        refitter = Refitter(llm)
        refitter.refit(make_policy(family, 1))
        found["before"], found["before_again"] = generate(llm), generate(llm)
        report = refitter.refit(policy)
        found |= {
            "live": live_bytes(llm),
            "wrong": wrong_tensors(llm, policy, kernel),
            "generated": generate(llm),
            "kv_scales": kv_scales(llm),
            "padding": num_padding_bytes_set(llm),
            "ignored": report.ignored,
            "layout": refitter.layout().model_dump(mode="json"),
        }
        scribble(llm)
        saved = {name: policy[name] for name in policy if name not in report.ignored}
        refitter.refit(saved)
        found["live_without_ignored"] = live_bytes(llm)
        return found


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
    policy = make_policy("qwen3", 2)
    first, second = Path(work) / "policy-1", Path(work) / "policy-2"
    for seed, folder in enumerate((first, second), start=1):
        save_model("qwen3", seed, folder)
    with booted(second, kernel, quantization="fp8_per_block") as llm:
        found = {"own": live_bytes(llm)}
    with booted(first, kernel, quantization="fp8_per_block") as llm:
        found["booted"] = live_bytes(llm)
        refitter = Refitter(llm)
        refitter.refit(policy)
        found |= {"refitted": live_bytes(llm), "wrong": wrong_tensors(llm, policy, kernel)}
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
        return found


def run_live(work: str) -> dict:
    """One engine through everything that may happen to it between two refits."""
    folder = Path(work) / "bf16"
    save_model("qwen3", 1, folder)
    with booted_dummy(folder, "fp32") as llm:
        refitter = Refitter(llm)
        found = {"policies": try_policies(llm, refitter)}
        refitter.refit(make_policy("qwen3", 1))
        found["good"] = good = state(llm)
        for name, attempt in ATTEMPTS.items():
            found[name] = attempt(llm, refitter)
            refitter.refit(make_policy("qwen3", 1))
            found[name]["healed"] = state(llm) == good and not refitter.is_dirty
        found["streams"] = try_streams(llm, refitter, folder)
        return found


def state(llm) -> dict:
    return {"live": live_bytes(llm), **generate(llm)}


def try_policies(llm, refitter: Refitter) -> dict:
    """Five policies, one after another."""
    before = places(llm)
    rounds = []
    for seed in range(1, 6):
        policy = make_policy("qwen3", seed)
        report = refitter.refit(policy)
        rounds.append(
            {
                "version": report.version,
                "wrong": wrong_tensors(llm, policy, "fp32"),
                "tokens": [output["tokens"] for output in generate(llm)["outputs"]],
                "traces": [name for name in vars(llm.llm_engine) if name == "add_request"],
            }
        )
    after = places(llm)
    return {"rounds": rounds, "num_tensors": len(before), "moved": [n for n in before if before[n] != after.get(n)]}


def try_bad_values(llm, refitter: Refitter) -> dict:
    """NaN in a quantized and Inf in a copied tensor, looked for before and while writing."""
    policy = make_policy("qwen3", 2)
    policy[UP_PROJ][300, 200] = torch.nan
    policy[NORM][7] = torch.inf
    before = live_bytes(llm)
    strict = Refitter(llm, validate="strict")
    found = {"strict": refused(strict.refit, policy), "strict_untouched": live_bytes(llm) == before}
    found |= {"strict_dirty": strict.is_dirty, "fused": refused(refitter.refit, policy), "dirty": refitter.is_dirty}
    found["generate"] = refused(generate, llm)
    found["add_request"] = refused(llm.llm_engine.add_request, "late", {"prompt_token_ids": PROMPTS[0]}, SAMPLING)
    found["unfinished"] = llm.llm_engine.get_num_unfinished_requests()
    return found


def try_bad_names(llm, refitter: Refitter) -> dict:
    """One name missing, one unexpected, one of the wrong shape."""
    policy = make_policy("qwen3", 2)
    del policy[NORM]
    policy["model.layers.9.mlp.up_proj.weight"] = policy[UP_PROJ]
    policy[UP_PROJ] = policy[UP_PROJ][:128]
    before = state(llm)
    found = {"refit": refused(refitter.refit, policy), "dirty": refitter.is_dirty}
    return found | {
        "live_untouched": live_bytes(llm) == before["live"],
        "still_generates": refused(generate, llm) is None,
    }


def try_busy(llm, refitter: Refitter) -> dict:
    """A refit between two steps of a request, and the same request without one."""
    before = live_bytes(llm)
    found = {}

    def refit() -> None:
        found.update(refit=refused(refitter.refit, make_policy("qwen3", 2)), dirty=refitter.is_dirty)

    found["undisturbed"] = step_through(llm, lambda: None)
    found["disturbed"] = step_through(llm, refit)
    return found | {"live_untouched": live_bytes(llm) == before}


def step_through(llm, after_first_step) -> list[dict]:
    """Run one request by hand, with something else between its first two steps."""
    llm.reset_prefix_cache()
    llm.llm_engine.add_request("by hand", {"prompt_token_ids": PROMPTS[2]}, SAMPLING)
    outputs = llm.llm_engine.step()
    after_first_step()
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    return [said(output) for output in outputs if output.finished]


def try_asleep(llm, refitter: Refitter) -> dict:
    """vLLM ignores sleep mode on a CPU, so its mark is set by hand: the mark is what is tested, not the memory."""
    before = live_bytes(llm)
    executor = llm.llm_engine.model_executor
    executor.sleeping_tags = {"weights"}
    found = {"refit": refused(refitter.refit, make_policy("qwen3", 2)), "dirty": refitter.is_dirty}
    executor.sleeping_tags = set()
    return found | {"live_untouched": live_bytes(llm) == before}


def try_held_block(llm, refitter: Refitter) -> dict:
    """A block of the KV cache that somebody keeps: vLLM's own flush then does nothing and says False."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(1)
    found = {"refit": refused(refitter.refit, make_policy("qwen3", 2)), "dirty": refitter.is_dirty}
    found["generate"] = refused(generate, llm)
    pool.free_blocks(blocks)
    return found


def try_two_refitters(llm, refitter: Refitter) -> dict:
    """Another refitter of the same engine, while the first exists."""
    other = Refitter(llm, validate="strict")
    versions = [refitter.version, other.version, other.refit(make_policy("qwen3", 2)).version]
    return {"versions": [*versions, refitter.version]}


ATTEMPTS = {
    "bad_values": try_bad_values,
    "bad_names": try_bad_names,
    "busy": try_busy,
    "asleep": try_asleep,
    "held_block": try_held_block,
    "two_refitters": try_two_refitters,
}


def try_streams(llm, refitter: Refitter, folder: Path) -> dict:
    """Policy 1 as files, iterators, wrapped names, fp32 and FP8, each over other bytes."""
    policy = make_policy("qwen3", 1)
    manifest = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in policy.items()}
    quantize_checkpoint(folder, folder.with_name("fp8"), like=refitter.layout())
    sources = {
        "safetensors": (folder, None),
        "block-FP8 safetensors": (folder.with_name("fp8"), None),
        "function": (lambda: iter(policy.items()), None),
        "one-shot iterator": (iter(policy.items()), None),
        "one-shot iterator with manifest": (iter(policy.items()), manifest),
        "list of pairs": (list(policy.items()), None),
        "fp32": ({name: tensor.float() for name, tensor in policy.items()}, None),
        "wrapped names": ({f"module._orig_mod.{name}": tensor for name, tensor in policy.items()}, None),
    }
    found = {}
    for kind, (source, announced) in sources.items():
        scribble(llm)
        refitter.refit(source, manifest=announced)
        found[kind] = live_bytes(llm)
    return found


def run_refusals(work: str) -> dict:
    """Engines with layers that cannot be written in place."""
    bf16, moe = Path(work) / "bf16", Path(work) / "moe"
    save_model("qwen3", 1, bf16)
    save_moe(moe)
    engines = {
        "repacking kernel": booted_dummy(bf16, "repacking"),
        "bfloat16": booted(bf16, "fp32"),
        "mixture of experts": booted(moe, "fp32", load_format="dummy"),
    }
    found = {}
    for kind, engine in engines.items():
        with engine as llm:
            before = state(llm)
            refitter = Refitter(llm)
            found[kind] = {"refit": refused(refitter.refit, make_policy("qwen3", 2)), "dirty": refitter.is_dirty}
            found[kind] |= {"untouched": state_after(llm) == before, "refusals": refitter.layout().refusals}
    return found


def state_after(llm) -> dict:
    """`state`, without the help of the prefix cache."""
    llm.reset_prefix_cache()
    return state(llm)


def save_moe(folder: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=259,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def run_multiprocess(work: str) -> dict:
    """An engine whose core runs in another process, as vLLM's do by default."""
    folder = Path(work) / "bf16"
    save_model("qwen3", 1, folder)
    with booted(folder, "fp32") as llm:
        return {"refit": refused(Refitter, llm), "still_generates": refused(generate, llm) is None}


SCENARIOS = {
    "refit": run_refit,
    "fresh": run_fresh,
    "online": run_online,
    "live": run_live,
    "refusals": run_refusals,
    "multiprocess": run_multiprocess,
}


def main(scenario: Path, result: Path) -> None:
    torch.compiler.set_stance("force_eager")
    asked = json.loads(scenario.read_text())
    result.write_text(json.dumps(SCENARIOS[asked["name"]](**asked["arguments"])))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
