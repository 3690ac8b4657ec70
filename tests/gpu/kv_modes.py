"""One engine, or one model of transformers, with an FP8 KV cache.

vllm, sglang         its scales; with `--kv auto` a BF16 KV cache, whose result is the reference of the others
vllm-sleep           scales that are set before the KV cache wakes up
transformers-FORMAT  an independent pass with unquantized attention; ue8m0 or fp32
"""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import policies
import torch
from harness import WHOLE, log, timed
from live_engines import Engine, Sglang, Vllm
from torch import Tensor

from fp8refit import Refitter, UnsupportedEngineError
from fp8refit.config import KvOrder, RefitConfig
from tests.outliers import with_outliers

CALIBRATION = [[(37 * i * i + 11 * j + 13 * i * j) % 50000 + 100 for j in range(512)] for i in range(16)]
"""8 192 tokens."""
PROMPTS = [[(31 * i + 7 * j + i * j * j) % 50000 + 100 for j in range(200 + 60 * i)] for i in range(4)]
CACHED = [(17 * j) % 50000 + 100 for j in range(400)]
NUM_NEW = 24
LARGER = 8.0
FACTORS = (1 / 40, 512, 256, 512)
"""By which keys are enlarged, layer by layer, and repeated: K maxima from about 0.1 to 2 000."""
NUM_ROUNDS = 7


def boot(args, **options: Any) -> Engine:
    """A dummy engine with CUDA graphs; vLLM's in this process if it is one rank's."""
    policies.write_config(args.shape, args.work / "dummy")
    if args.backend:
        options["attention_backend"] = args.backend
    if args.mode == "sglang":
        kv_cache = "fp8_e4m3" if args.kv == "fp8" else "auto"
        own = {"kv_cache_dtype": kv_cache, "tp_size": args.tp, "chunked_prefill_size": 8192}
        return Sglang(args.work / "dummy", is_noise=True, **own | options)
    return Vllm(
        args.work / "dummy",
        is_inside=args.tp == 1,
        is_noise=True,
        is_compiled=True,
        kv_cache_dtype=args.kv,
        tensor_parallel_size=args.tp,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=8 << 30,  # else vLLM would profile, which fails if another process ends meanwhile
        **options,
    )


def make_policies(shape: str) -> dict[str, dict[str, Tensor]]:
    """An ordinary policy; one with outliers, which is the same function; one with larger keys, which is another.

    Of a shape with an LM head of its own: one that is tied would say each token again, with certainty.
    """
    base = policies.fill_policy(policies.allocate(shape), 1)
    # Layers add little to what they are given, attention most of it: errors add up, and do not grow from layer to layer until
    # nothing can be compared; the LM head makes them visible. Attention is flat enough to be no lottery when keys are eight
    # times as large.
    for module, factor in (
        ("o_proj", 0.1),
        ("down_proj", 0.005),
        ("q_norm", 0.25),
        ("embed_tokens", 50),
        ("lm_head", 4),
    ):
        for name in [name for name in base if name.endswith(f"{module}.weight")]:
            base[name].mul_(factor)
    larger = {name: x * LARGER if name.endswith("k_norm.weight") else x for name, x in base.items()}
    return {"base": base, "outliers": with_outliers(base, FACTORS, values_by=8), "larger": larger}


CALM = 1 / 16


def calm(policy: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same maxima with less noise in them: layers add less still to what they are given.

    Two ranks and one, and every two engines, round differently. In a deep network of random weights that grows from layer to
    layer; single values, as maxima are, then differ by more than what a comparison of scales should find.
    """
    return {name: x * CALM if name.endswith(("o_proj.weight", "down_proj.weight")) else x for name, x in policy.items()}


def run_reference(engine: Engine, args) -> dict:
    """What is said with a BF16 KV cache, and that such an engine is not calibrated."""
    refitter, found = Refitter(engine.candidate), {}
    for name, policy in make_policies(args.shape).items():
        log(f"reference: {name}")
        refitter.refit(policy)
        tokens, _ = engine.continue_(PROMPTS, NUM_NEW)
        sequences = [[*prompt, *new] for prompt, new in zip(PROMPTS, tokens, strict=True)]
        found[name] = {"sequences": sequences, "scores": engine.score(sequences)}
    try:
        refitter.calibrate(CALIBRATION)
    except UnsupportedEngineError as error:
        found["refusal"] = str(error)
    return {"reference": found}


def run_scales(engine: Engine, args) -> dict:
    """The error of an FP8 KV cache with scales of 1.0, stale and calibrated ones."""
    reference = json.loads(args.reference.read_text())["reference"] if args.reference else {}
    refitter = Refitter(engine.candidate)
    layout = refitter.layout().kv
    ones = {f"{layer}.{kind}_scale": 1.0 for layer, kinds in layout.scales.items() for kind in kinds}
    result: dict[str, Any] = {"kv": layout.model_dump(mode="json"), "errors": {}, "scales": {}, "reports": {}}
    made = make_policies(args.shape)

    def look(name: str, label: str) -> None:
        log(f"{name} {label}")
        if reference:
            result["errors"][f"{name} {label}"] = error_of(engine, reference[name])

    def calibrate(name: str) -> None:
        report = refitter.refit(made[name], calibration=CALIBRATION)
        result["scales"][name] = report.kv.scales
        result["reports"][name] = report.model_dump(mode="json", exclude={"kv", "ranks"}) | {"kept": report.kv.kept}
        look(name, "calibrated")

    refitter.refit(made["base"], kv_scales=ones)
    look("base", "1.0")
    calibrate("base")
    refitter.refit(made["larger"])
    look("larger", "stale")
    calibrate("larger")
    refitter.refit(made["outliers"], kv_scales=ones)
    look("outliers", "1.0")
    calibrate("outliers")
    for name in ("base", "outliers"):
        report = refitter.refit(calm(made[name]), calibration=CALIBRATION)
        result["scales"][f"calm {name}"] = report.kv.scales
    refitter.refit(made["outliers"], calibration=CALIBRATION)
    log("decode against prefill")
    replays = engine.ask("replays")[0]
    tokens, decoded = engine.continue_(PROMPTS, NUM_NEW)
    result["graph_replays"] = engine.ask("replays")[0] - replays
    scores = engine.score([[*prompt, *new] for prompt, new in zip(PROMPTS, tokens, strict=True)])
    result["decode_against_prefill"] = mean_difference(decoded, [row[-NUM_NEW:] for row in scores])
    log("prefix cache")
    engine.num_cached(CACHED)
    before = engine.num_cached(CACHED)
    refitter.refit(made["outliers"], calibration=CALIBRATION)
    result["cached_tokens"] = {"before": before, "after": engine.num_cached(CACHED), "again": engine.num_cached(CACHED)}
    result["live_scales"] = engine.ask("kv_scales")[0]
    log("cost")
    result["cost"] = measure_cost(engine, refitter)
    return result


def error_of(engine: Engine, reference: dict) -> float:
    """Mean absolute difference of log-probabilities to a BF16 KV cache; infinite if there are NaN."""
    engine.drop_caches()
    return mean_difference(engine.score(reference["sequences"]), reference["scores"])


def mean_difference(left: list[list[float]], right: list[list[float]]) -> float:
    pairs = [pair for rows in zip(left, right, strict=True) for pair in zip(*rows, strict=True)]
    found = statistics.fmean(abs(a - b) for a, b in pairs)
    return found if math.isfinite(found) else float("inf")


def measure_cost(engine: Engine, refitter: Refitter) -> dict:
    """Seconds of one calibration, and of prefills of the same tokens, interleaved."""
    ways: dict[str, Callable[[], float]] = {
        "calibration": lambda: refitter.calibrate(CALIBRATION).seconds,
        "engine's prefill": lambda: engine.prefill_s(CALIBRATION),
    }
    if engine.worker is not None:
        live = refitter._engine.ranks.rank.target.live
        order, settings = KvOrder(token_ids=CALIBRATION), RefitConfig().kv
        sequences = [torch.tensor(ids, device=policies.DEVICE) for ids in CALIBRATION]
        prefill = torch.inference_mode()(lambda: live.kv._cache.prefill(sequences, lambda *_: None))
        ways |= {
            "measured pass": lambda: timed(lambda: live.kv.measure(order, settings))[0],
            "same pass, not measured": lambda: timed(prefill)[0],
            "engine's eager prefill": lambda: eager_prefill_s(engine),
        }
    rounds = [{name: measure() for name, measure in ways.items()} for _ in range(NUM_ROUNDS + 2)]
    return {name: statistics.median(row[name] for row in rounds[2:]) for name in ways} | {
        "num_tokens": sum(map(len, CALIBRATION))
    }


def eager_prefill_s(engine: Vllm) -> float:
    """vLLM's own prefill, with its model called as it is, not compiled."""
    from vllm import forward_context

    create = forward_context.create_forward_context

    def not_compiled(*arguments, **keywords):
        context = create(*arguments, **keywords)
        context.skip_compiled = True
        return context

    forward_context.create_forward_context = not_compiled
    try:
        return engine.prefill_s(CALIBRATION)
    finally:
        forward_context.create_forward_context = create


def run_engine(args) -> dict:
    return (run_scales if args.kv == "fp8" else run_reference)(boot(args), args)


def run_vllm_sleep(args) -> dict:
    """Scales set before the KV cache wakes up are there when it has."""
    result = {}
    engine = boot(args, enable_sleep_mode=True)
    llm, refitter, policy = engine.candidate, Refitter(engine.candidate), make_policies(args.shape)["outliers"]
    refitter.refit(policy, calibration=CALIBRATION)
    engine.drop_caches()
    result["said"] = engine.continue_(PROMPTS, NUM_NEW)
    result["live_scales"] = engine.ask("kv_scales")[0]
    for level in (1, 2):
        log(f"sleep level {level}")
        llm.sleep(level=level)
        llm.wake_up(tags=["weights"])
        scales = refitter.refit(policy, calibration=CALIBRATION).kv.scales
        llm.wake_up(tags=["kv_cache"])
        engine.drop_caches()
        result[f"level {level}"] = {
            "scales": scales,
            "live_scales": engine.ask("kv_scales")[0],
            "said": engine.continue_(PROMPTS, NUM_NEW),
        }
        llm.sleep(level=1)
        llm.wake_up()
        result[f"level {level}"]["live_scales_after_a_nap"] = engine.ask("kv_scales")[0]
    return result


def run_transformers(args) -> dict:
    """Maxima of an independent pass: transformers' own attention and cache, on the same FP8 weights."""
    from fp8refit_transformers import to_block_fp8
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    policies.write_config(args.shape, args.work / "dummy")
    config = AutoConfig.from_pretrained(args.work / "dummy")
    torch.set_default_device("cuda")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    engine = to_block_fp8(model, scale_format=args.mode.removeprefix("transformers-"))
    attend, queries = ALL_ATTENTION_FUNCTIONS["sdpa"], {}

    def watch(module, query, *arguments, **keywords):
        queries[module.layer_idx] = max(queries.get(module.layer_idx, 0.0), float(query.abs().max()))
        return attend(module, query, *arguments, **keywords)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = watch
    result: dict[str, dict[str, float]] = {}
    made = make_policies(args.shape)
    with torch.inference_mode():
        for name in ("base", "outliers", "larger", "calm base", "calm outliers"):
            log(f"transformers: {name}")
            policy = made[name.removeprefix("calm ")]
            Refitter(engine).refit(calm(policy) if name.startswith("calm") else policy)
            queries.clear()
            amax: dict[str, float] = {}
            for sequence in CALIBRATION:
                cache = DynamicCache()
                engine.model(torch.tensor([sequence]), past_key_values=cache, use_cache=True)
                for index, layer in enumerate(cache.layers):
                    for kind, tensor in (("k", layer.keys), ("v", layer.values)):
                        key = f"model.layers.{index}.self_attn.{kind}_scale"
                        amax[key] = max(amax.get(key, 0.0), float(tensor.abs().max()))
            amax |= {f"model.layers.{index}.self_attn.q_scale": value for index, value in queries.items()}
            result[name] = amax
    return {"amax": result}


OPTIONS = {
    "kv": {"choices": ("fp8", "auto"), "default": "fp8"},
    "tp": WHOLE,
    "backend": {},
    "reference": {"type": Path},
}
MODES = {
    "vllm": run_engine,
    "vllm-sleep": run_vllm_sleep,
    "sglang": run_engine,
    "transformers-ue8m0": run_transformers,
    "transformers-fp32": run_transformers,
}
