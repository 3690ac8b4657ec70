"""vLLM engines with a model that drafts tokens: one that is refitted with its draft and without it, and one booted afresh.

    refit    an engine of policy 1, moved to policy 2 with its draft, to policy 1 without it, and to policy 1 with it
    fresh    boots from policy 2, quantized as that engine's layout says

The draft is a model of the target's shape with the target's own weights: it guesses right as long as both hold one policy.
"""

from functools import partial
from pathlib import Path
from typing import Any

import policies
from checkpoints import write_shards
from harness import free_bytes, log, timed
from live_engines import PROMPTS, Vllm
from live_model import hash_bytes
from torch import Tensor

from fp8refit import Refitter
from fp8refit.checkpoint import quantize_checkpoint

NUM_GUESSES = 3
NUM_TOKENS = 64
NUM_REFITS = 50


def boot(model: Path, draft: Path, **options: Any) -> Vllm:
    drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": NUM_GUESSES}
    return Vllm(model, is_inside=True, speculative_config=drafts, disable_log_stats=False, **options)


def saved(args: Any, seed: int) -> Path:
    folder = args.work / f"policy-{seed}"
    write_shards(policy_of(args, seed).items(), folder)
    policies.write_config(args.shape, folder)
    return folder


def policy_of(args: Any, seed: int) -> dict[str, Tensor]:
    return policies.fill_policy(policies.allocate(args.shape), seed)


def state_of(engine: Vllm) -> dict[str, Any]:
    """What it says and holds, and how many of the draft's guesses were right."""
    found = engine.observe() | {"draft": hash_bytes(engine.worker.model_runner.drafter.model.state_dict())}
    before = counts_of(engine)
    engine.say(PROMPTS, NUM_TOKENS)
    guessed, right = (after - old for after, old in zip(counts_of(engine), before, strict=True))
    log(f"{right} of {guessed} guesses were right")
    return found | {"guessed": guessed, "acceptance": right / guessed}


def counts_of(engine: Vllm) -> tuple[int, int]:
    """Guesses so far, and right ones."""
    counted = {metric.name: metric.value for metric in engine.candidate.get_metrics() if hasattr(metric, "value")}
    return counted["vllm:spec_decode_num_draft_tokens"], counted["vllm:spec_decode_num_accepted_tokens"]


def run_refit(args: Any) -> dict[str, Any]:
    folder = saved(args, 1)
    engine = boot(folder, folder, quantization="fp8_per_block")
    refitter = Refitter(engine.candidate)
    old, new = (policy_of(args, seed) for seed in (1, 2))
    whole = {seed: each | {f"draft.{n}": t for n, t in each.items()} for seed, each in ((1, old), (2, new))}
    found: dict[str, Any] = {"booted": state_of(engine)}
    report = refitter.refit(whole[2])
    found |= {"refitted": state_of(engine), "num_slots": len(refitter.layout().slots), "first_ms": report.total_s * 1e3}
    Refitter(engine.candidate, keep=["draft.*"]).refit(old)
    found["stale"] = state_of(engine)
    refitter.refit(whole[1])
    found["back"] = state_of(engine)
    free, times_ms = free_bytes(), []
    for index in range(NUM_REFITS):
        seconds, *_ = timed(partial(refitter.refit, whole[1 + index % 2]))
        times_ms.append(seconds * 1e3)
    found |= {"times_ms": times_ms, "grown_bytes": free - free_bytes(), "last": state_of(engine)}
    quantize_checkpoint(saved(args, 2), args.work / "policy-2-fp8", like=refitter.layout())
    engine.shutdown()
    return found


def run_fresh(args: Any) -> dict[str, Any]:
    return state_of(boot(args.work / "policy-2-fp8", args.work / "policy-2"))


MODES = {"refit": run_refit, "fresh": run_fresh}
OPTIONS: dict[str, dict] = {}
