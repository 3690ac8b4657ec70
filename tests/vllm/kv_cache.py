"""Engines with an FP8 KV cache, and what calibration does to what they say, hold and cache. `test_kv_cache.py` judges it.

Errors are those of log-probabilities of prompts, against an engine of the same weights whose KV cache is BF16.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engines import (
    KV_SCALES,
    PROMPTS,
    SAMPLING,
    booted_dummy,
    generate,
    kv_scales,
    live_bytes,
    model_of,
    places,
    refused,
)
from torch import Tensor
from vllm import LLM, SamplingParams

from fp8refit import KvConfig, Refitter
from tests.outliers import BATCH, calm_policy, with_larger_keys, with_outliers
from tests.tiny_models import VOCAB_SIZE, save_model

QWEN, LLAMA = "qwen3_deep", "llama_deep"
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
TEACHER_FORCED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
ATTENTIONS = [f"model.layers.{index}.self_attn" for index in range(4)]
LAST_ATTENTION = ATTENTIONS[-1]
ONES = {f"{name}.{kind}_scale": 1.0 for name in ATTENTIONS for kind in ("k", "v")}
POLICIES: dict[str, dict[str, Callable[[], dict[str, Tensor]]]] = {
    QWEN: {"base": lambda: calm_policy(QWEN, 2), "outliers": lambda: with_outliers(calm_policy(QWEN, 2))},
    LLAMA: {"base": lambda: calm_policy(LLAMA, 2), "larger keys": lambda: with_larger_keys(calm_policy(LLAMA, 2), 8)},
}


def run_kv_cache(work: str) -> dict:
    """Engines of two families, with a BF16 KV cache and with an FP8 one."""
    found: dict[str, Any] = {"said": {}}
    for family, policies in POLICIES.items():
        save_model(family, 1, Path(work) / family)
        with booted_dummy(Path(work) / family, "fp32") as llm:
            refitter = Refitter(llm)
            found["said"][family] = {}
            for name, make_policy in policies.items():
                refitter.refit(make_policy())
                found["said"][family][name] = teacher_forced(llm)
            if family == QWEN:
                found["without"] = try_without_fp8_cache(llm, refitter)
    for family, attempts in ATTEMPTS.items():
        with booted_dummy(Path(work) / family, "fp32", kv_cache_dtype="fp8") as llm:
            refitter = Refitter(llm)
            for name, attempt in attempts.items():
                found[name] = attempt(llm, refitter)
    return found


def teacher_forced(llm: LLM) -> list[float]:
    """The log-probability of every token of `BATCH` after those before it."""
    prompts = [{"prompt_token_ids": prompt} for prompt in BATCH]
    outputs = llm.generate(prompts, TEACHER_FORCED, use_tqdm=False)
    return [
        entries[token].logprob
        for prompt, output in zip(BATCH, outputs, strict=True)
        for token, entries in list(zip(prompt, output.prompt_logprobs, strict=True))[1:]
    ]


def weights(llm: LLM) -> dict[str, str]:
    """A sha256 of everything but KV scales."""
    return {name: digest for name, digest in live_bytes(llm).items() if not name.endswith(KV_SCALES)}


def answer(llm: LLM) -> int:
    """How many tokens it says to a short prompt."""
    (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, ONE_TOKEN, use_tqdm=False)
    return len(output.outputs[0].token_ids)


def scribble_scales(llm: LLM) -> None:
    """Noise in every copy of every KV scale, as a dummy boot leaves it where vLLM does not look after them."""
    for module in model_of(llm).modules():
        if hasattr(module, "_k_scale_float"):
            for name, value in (vars(module) | module._buffers).items():
                if name.startswith(KV_SCALES) and isinstance(value, Tensor):
                    value.fill_(0.3)
                elif name.startswith(KV_SCALES) and value is not None:
                    setattr(module, name, 0.3)


def traces(llm: LLM) -> list[str]:
    """What a calibration left on the engine and its modules."""
    left = [name for name, module in model_of(llm).named_modules() if "forward" in vars(module)]
    return left + [name for name in vars(llm.llm_engine) if name == "add_request"]


def after_refusal(llm: LLM, refitter: Refitter, attempt: Callable[[], object]) -> dict:
    """Which error `attempt` raises, and what is left of it on an engine that has to serve on."""
    before = [live_bytes(llm), kv_scales(llm), places(llm), refitter.version]
    found: dict[str, Any] = {"refused": refused(attempt, error_type=Exception), "dirty": refitter.is_dirty}
    found["untouched"] = [live_bytes(llm), kv_scales(llm), places(llm), refitter.version] == before
    return found | {"serves": answer(llm), "traces": traces(llm)}


def after_failure(llm: LLM, refitter: Refitter, attempt: Callable[[], object]) -> dict:
    """Which error `attempt` raises on an engine that has to refuse requests then, and whether the next refit heals it."""
    found: dict[str, Any] = {"refused": refused(attempt, error_type=Exception), "dirty": refitter.is_dirty}
    found["generate"] = refused(answer, llm)
    found["add_request"] = refused(llm.llm_engine.add_request, "late", {"prompt_token_ids": PROMPTS[0]}, SAMPLING)
    found |= {"calibrate": refused(refitter.calibrate, BATCH), "hooks": [n for n in traces(llm) if n != "add_request"]}
    report = refitter.refit(calm_policy(QWEN, 2), calibration=BATCH)
    found |= {"still_dirty": refitter.is_dirty, "serves": answer(llm), "traces": traces(llm)}
    return found | {"scales": report.kv.scales, "copies": kv_scales(llm)}


def try_without_fp8_cache(llm: LLM, refitter: Refitter) -> dict:
    """Scales for an engine whose KV cache is BF16."""
    policy = calm_policy(QWEN, 2)
    attempts = {
        "refit": lambda: refitter.refit(policy, calibration=BATCH),
        "given": lambda: refitter.refit(policy, kv_scales={f"{LAST_ATTENTION}.k_scale": 2.0}),
        "calibrate": lambda: refitter.calibrate(BATCH),
    }
    found = {name: after_refusal(llm, refitter, attempt) for name, attempt in attempts.items()}
    before = kv_scales(llm)
    report = refitter.refit({**policy, f"{LAST_ATTENTION}.k_scale": torch.tensor(2.0)})
    found["sent"] = {"ignored": report.ignored, "kv": report.kv, "untouched": kv_scales(llm) == before}
    return found


def try_first_refit(llm: LLM, refitter: Refitter) -> dict:
    """Weights and scales are noise; the first refit calibrates already."""
    scribble_scales(llm)
    booted, before = kv_scales(llm), places(llm)
    report = refitter.refit(POLICIES[QWEN]["outliers"](), calibration=BATCH)
    found = {"booted": booted, "copies": kv_scales(llm), "moved": places(llm) != before, "traces": traces(llm)}
    return found | {"report": report.kv.model_dump(), "version": report.version, "phases": list(report.phases_s)}


def try_policies(llm: LLM, refitter: Refitter) -> dict:
    """What each policy says with scales of 1, and calibrated."""
    found = {}
    for name, make_policy in POLICIES[QWEN].items():
        policy = make_policy()
        refitter.refit(policy, kv_scales=ONES)
        found[name] = {"ones": teacher_forced(llm), "weights": weights(llm), "copies of ones": kv_scales(llm)}
        report = refitter.refit(policy, calibration=BATCH)
        found[name] |= {"calibrated": teacher_forced(llm), "scales": report.kv.scales}
        found[name]["same weights"] = weights(llm) == found[name].pop("weights")
    return found


def try_prefix_cache(llm: LLM, refitter: Refitter) -> dict:
    """A long prompt, repeated before and after scales changed."""
    policy, steps = calm_policy(QWEN, 2), {}
    refitter.refit(policy)
    for name, change in {
        "nothing": lambda: None,
        "refit": lambda: refitter.refit(policy, calibration=BATCH),
        "calibrate": lambda: refitter.calibrate(BATCH),
    }.items():
        change()
        steps[name] = [generate(llm)["num_cached"][-1] for _ in range(2)]
    return steps


def try_calibrate(llm: LLM, refitter: Refitter) -> dict:
    """Calibration alone, of a policy whose scales are another's: what a refit with calibration gives."""
    policy = calm_policy(QWEN, 2)
    refitter.refit(POLICIES[QWEN]["outliers"](), calibration=BATCH)
    carried = kv_scales(llm)
    plain = refitter.refit(policy)
    found: dict[str, Any] = {"carried": kv_scales(llm) == carried, "plain": plain.kv}
    version, before, held = refitter.version, places(llm), weights(llm)
    report = refitter.calibrate(BATCH)
    found |= {"report": report.model_dump(), "copies": kv_scales(llm), "traces": traces(llm)}
    found |= {"untouched": places(llm) == before and weights(llm) == held and refitter.version == version}
    return found | {"refit": refitter.refit(policy, calibration=BATCH).kv.scales}


def try_batches(llm: LLM, refitter: Refitter) -> dict:
    """The same tokens in other clothes, and a batch that is cut."""
    ids = torch.tensor([BATCH[2][:40], BATCH[3][:40]])
    forms = {
        "lists": ids.tolist(),
        "tensor": ids,
        "padded": {"input_ids": torch.nn.functional.pad(ids, (5, 0)), "attention_mask": padded_mask(ids)},
    }
    found = {name: refitter.calibrate(batch).scales for name, batch in forms.items()}
    cut = Refitter(llm, kv=KvConfig(max_tokens=50)).calibrate(BATCH)
    found["cut"] = [cut.num_sequences, cut.num_tokens, cut.num_passes]
    kept = Refitter(llm, kv=KvConfig(scales=("k",), margin=2.0)).calibrate(ids)
    return found | {"keys": kept.scales, "copies": kv_scales(llm)}


def padded_mask(ids: Tensor) -> Tensor:
    return torch.nn.functional.pad(torch.ones_like(ids), (5, 0))


def try_given_scales(llm: LLM, refitter: Refitter) -> dict:
    """Scales from a trainer, by every way and name."""
    policy = calm_policy(QWEN, 2)
    names = [f"{attention}.{{}}{kind}_scale" for attention in ATTENTIONS for kind in ("k", "v")]
    values = {name: 0.5 + index / 8 for index, name in enumerate(names)}
    engine_s = {name.format("attn."): value for name, value in values.items()}
    checkpoint_s = {name.format(""): value for name, value in values.items()}
    queries = {f"{LAST_ATTENTION}.q_scale": 3.0, "model.layers.0.self_attn.attn.q_scale": 3.0}
    tensors = {name: torch.tensor(value) for name, value in checkpoint_s.items()}
    ways = {
        "kv_scales": lambda: refitter.refit(policy, kv_scales=checkpoint_s),
        "kv_scales as engines spell them": lambda: refitter.refit(policy, kv_scales=engine_s),
        "kv_scales with queries'": lambda: refitter.refit(policy, kv_scales=checkpoint_s | queries),
        "mapping": lambda: refitter.refit({**policy, **tensors}),
        "iterator": lambda: refitter.refit(iter([*policy.items(), *tensors.items()])),
        "mapping with queries'": lambda: refitter.refit(
            {**policy, **tensors, **{name: torch.tensor([value]) for name, value in queries.items()}}
        ),
        "kv_scales over the mapping's": lambda: refitter.refit(
            {**policy, **{name: 9 * tensor for name, tensor in tensors.items()}}, kv_scales=checkpoint_s
        ),
    }
    found: dict[str, Any] = {"wanted": checkpoint_s, "ways": {}}
    for name, way in ways.items():
        refitter.refit(policy, kv_scales=ONES)
        report = way()
        found["ways"][name] = {"report": report.kv.model_dump(), "ignored": report.ignored, "copies": kv_scales(llm)}
    refitter.refit(calm_policy(QWEN, 3))
    return found | {"carried": kv_scales(llm), "traces": traces(llm)}


def try_refusals(llm: LLM, refitter: Refitter) -> dict:
    """What fits neither engine nor batch."""
    policy = calm_policy(QWEN, 3)
    name = f"{LAST_ATTENTION}.k_scale"
    given = {
        "zero": {"kv_scales": {name: 0.0}},
        "NaN": {"kv_scales": {name: float("nan")}},
        "negative": {"kv_scales": {name: -1.0}},
        "infinite": {"kv_scales": {name: torch.tensor(torch.inf)}},
        "not one number": {"kv_scales": {name: torch.ones(2)}},
        "unknown name": {"kv_scales": {"model.layers.9.self_attn.k_scale": 1.0}},
        "both": {"kv_scales": {name: 1.0}, "calibration": BATCH},
        "no token": {"calibration": []},
        "out of vocabulary": {"calibration": [[1, 2, VOCAB_SIZE]]},
        "too long": {"calibration": [[1] * 513]},
        "prompts": {"calibration": ["Once upon a time"]},
    }
    found = {
        kind: after_refusal(llm, refitter, lambda more=more: refitter.refit(policy, **more))
        for kind, more in given.items()
    }
    alone = {kind: more["calibration"] for kind, more in given.items() if list(more) == ["calibration"]}
    return found | {
        f"{kind}, calibrate": after_refusal(llm, refitter, lambda batch=batch: refitter.calibrate(batch))
        for kind, batch in alone.items()
    }


def try_busy(llm: LLM, refitter: Refitter) -> dict:
    """A calibration between two steps of a request."""
    llm.reset_prefix_cache()
    llm.llm_engine.add_request("by hand", {"prompt_token_ids": PROMPTS[2]}, SAMPLING)
    llm.llm_engine.step()
    before = kv_scales(llm)
    found: dict[str, Any] = {"refused": refused(refitter.calibrate, BATCH), "untouched": kv_scales(llm) == before}
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    return found | {"finished": len(outputs[-1].outputs[0].token_ids), "dirty": refitter.is_dirty}


def try_nan_policy(llm: LLM, refitter: Refitter) -> dict:
    """A policy whose NaN nobody looks for, but calibration meets."""
    policy = calm_policy(QWEN, 3)
    policy["model.layers.1.input_layernorm.weight"] = policy["model.layers.1.input_layernorm.weight"] * torch.nan
    heedless = Refitter(llm, validate="off")
    return after_failure(llm, refitter, lambda: heedless.refit(policy, calibration=BATCH))


def try_failing_pass(llm: LLM, refitter: Refitter) -> dict:
    """A calibration pass that raises half way, after the weights were written."""

    def fail() -> None:
        with failing_mlp(llm):
            refitter.refit(calm_policy(QWEN, 3), calibration=BATCH)

    return after_failure(llm, refitter, fail)


def try_failing_pass_alone(llm: LLM, refitter: Refitter) -> dict:
    """The same without weights."""

    def fail() -> None:
        with failing_mlp(llm):
            refitter.calibrate(BATCH)

    return after_refusal(llm, refitter, fail)


def try_bad_scales_sent(llm: LLM, refitter: Refitter) -> dict:
    """NaN among the scales of a stream, which is seen when the weights are written."""
    policy = calm_policy(QWEN, 3) | {f"{LAST_ATTENTION}.v_scale": torch.tensor(torch.nan)}
    return after_failure(llm, refitter, lambda: Refitter(llm, validate="off").refit(iter(policy.items())))


@contextmanager
def failing_mlp(llm: LLM) -> Iterator[None]:
    """Let the third layer's MLP raise."""

    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    mlp = model_of(llm).model.layers[2].mlp
    mlp.__dict__["forward"] = fail
    try:
        yield
    finally:
        del mlp.__dict__["forward"]


def try_larger_keys(llm: LLM, refitter: Refitter) -> dict:
    """A policy of larger keys under the scales of the one before, and under its own."""
    base, larger = (make_policy() for make_policy in POLICIES[LLAMA].values())
    found: dict[str, Any] = {"base": refitter.refit(base, calibration=BATCH).kv.scales}
    found["base calibrated"] = teacher_forced(llm)
    refitter.refit(larger)
    found["stale"] = teacher_forced(llm)
    found["larger"] = refitter.refit(larger, calibration=BATCH).kv.scales
    return found | {"calibrated": teacher_forced(llm)}


ATTEMPTS: dict[str, dict[str, Callable[[LLM, Refitter], dict]]] = {
    QWEN: {
        "first refit": try_first_refit,
        "policies": try_policies,
        "prefix cache": try_prefix_cache,
        "calibrate": try_calibrate,
        "batches": try_batches,
        "given": try_given_scales,
        "refusals": try_refusals,
        "busy": try_busy,
        "NaN policy": try_nan_policy,
        "failing pass": try_failing_pass,
        "failing pass alone": try_failing_pass_alone,
        "bad scales sent": try_bad_scales_sent,
    },
    LLAMA: {"larger keys": try_larger_keys},
}
