"""Measures what FP8 gains: rollout tokens per second with BF16 weights, FP8 weights, and an FP8 KV cache."""

import json
import math
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fp8refit.bench import policies
from fp8refit.bench.clock import Percentiles
from fp8refit.bench.engine import adapter_module
from fp8refit.bench.result import gpu_name, stamp, versions_of
from fp8refit.bench.rollout_engine import Precision, RolloutBoot, RolloutEngine
from fp8refit.bench.rollout_result import (
    RolloutBenchConfig,
    RolloutBenchResult,
    RolloutTiming,
    command_of,
    environment_of,
)
from fp8refit.bench.shapes import folder_of
from fp8refit.driver.adapters import booting
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.layout import EngineLayout

_FIRST_TOKEN, _NUM_TOKENS = 100, 500
"""Prompt token ids; every language model's vocabulary has them."""
_WARM_UP_TOKENS = 32
"""New tokens in the warm-up run of each case, which compiles kernels."""
_CALIBRATION = (8, 128)
"""Number of sequences, and tokens in each."""


def run_rollout_bench(
    config: RolloutBenchConfig,
    *,
    earlier: RolloutBenchResult | None = None,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
    on_result: Callable[[RolloutBenchResult], None] = lambda _: None,
) -> RolloutBenchResult:
    """Boot one engine per precision, one after another, and time generation.

    Every engine gets the same share of its GPUs for weights and KV cache, and the same policy of random weights, created
    tensor by tensor: experts are chosen by the same routers. BF16 engines load it, FP8 engines are refitted to it, with
    calibrated KV scales if the cache is FP8. Prompts are random and differ in every run, so no prefix is cached.

    Args:
        config: What to measure.
        earlier: A result of the same command on the same machine. Only the cases it lacks are measured.
        on_progress: Called with the next step, cases done, and cases in total.
        on_result: Called after each case with the result so far.

    Raises:
        UnsupportedEngineError: The engine, shape or folder is unknown, the vocabulary lacks the prompts' ids, or the
            engine cannot be refitted; or `earlier` is a result of something else.
    """
    result = _empty_result(config)
    if earlier is not None:
        _check_same(earlier, result)
        result = earlier
    num_steps = len(config.precisions) * len(config.every_case)
    with tempfile.TemporaryDirectory(prefix="fp8refit-bench-") as scratch:
        model = folder_of(config.model, Path(scratch))
        _check_vocabulary(model)
        for precision in config.precisions:
            timed = {timing.case for timing in result.timings if timing.precision is precision}
            missing = [case for case in config.every_case if case not in timed]
            if not missing:
                continue
            on_progress(f"boot {precision}", len(result.timings), num_steps)
            engine = _open(config, model, precision)
            try:
                result = _with_engine(result, engine, precision)
                for case in missing:
                    on_progress(f"{precision}, {case[0]} x {case[1]} + {case[2]}", len(result.timings), num_steps)
                    timings = _against_bf16([*result.timings, _time(engine, config, precision, case)])
                    result = result.model_copy(update={"timings": timings})
                    on_result(result)
            finally:
                engine.close()
    on_progress("done", num_steps, num_steps)
    return result


def _empty_result(config: RolloutBenchConfig) -> RolloutBenchResult:
    return RolloutBenchResult(
        config=config,
        command=command_of(config, environment_of(config.engine)),
        gpu=gpu_name(),
        **stamp(()),
        versions=versions_of(),
        settings={},
        kv_tokens={},
        timings=(),
    )


def _check_same(earlier: RolloutBenchResult, result: RolloutBenchResult) -> None:
    """Check that both results come from one command and one kind of machine.

    Raises:
        UnsupportedEngineError: They do not.
    """
    for field in ("command", "gpu"):
        before, now = getattr(earlier, field), getattr(result, field)
        if before != now:
            raise UnsupportedEngineError(
                f"the earlier result has another {field}: {before!r}, not {now!r}; choose another file"
            )


def _with_engine(result: RolloutBenchResult, engine: RolloutEngine, precision: Precision) -> RolloutBenchResult:
    """Give a live engine its policy, and add what is known about it."""
    settings = {name: str(value) for name, value in engine.settings.items()}
    update: dict[str, Any] = {"settings": result.settings | {precision: settings}}
    if engine.num_kv_tokens is not None:
        update["kv_tokens"] = result.kv_tokens | {precision: engine.num_kv_tokens}
    if precision is Precision.BF16:
        with booting(result.config.engine, result.config.model, act="load a policy into"):
            engine.load_bf16(result.config.seed)
    else:
        layout = _refit(engine, result.config, precision)
        kernels = {f"{slot.kernel} {slot.format.scale_format}" for slot in layout.slots if slot.format is not None}
        update["versions"] = result.versions | layout.versions
        update["kernels"] = result.kernels | {precision: tuple(sorted(kernels))}
    return result.model_copy(update=update)


def _check_vocabulary(model: Path) -> None:
    """Check that the model's vocabulary contains the prompts' ids, if its config gives its size.

    Raises:
        UnsupportedEngineError: It does not.
    """
    size = json.loads((model / "config.json").read_bytes()).get("vocab_size")
    if isinstance(size, int) and size < _FIRST_TOKEN + _NUM_TOKENS:
        raise UnsupportedEngineError(
            f"{model} has a vocabulary of {size}, but prompts have ids up to {_FIRST_TOKEN + _NUM_TOKENS - 1}"
        )


def _open(config: RolloutBenchConfig, model: Path, precision: Precision) -> RolloutEngine:
    wanted = RolloutBoot(
        model=model,
        tp=config.tp,
        precision=precision,
        max_length=config.max_length,
        max_batch=config.max_batch,
        arguments=config.engine_arguments,
    )
    module = adapter_module(config.engine, "rollout")
    with booting(config.engine, config.model):
        engine: RolloutEngine = module.boot(wanted)
    return engine


def _refit(engine: RolloutEngine, config: RolloutBenchConfig, precision: Precision) -> EngineLayout:
    """Replace the engine's dummy weights with random ones, calibrate scales, and return the engine's layout."""
    with Refitter(engine.candidate) as refitter:
        layout = refitter.layout()
        device = torch.device("cuda" if torch.cuda.is_available() and layout.device.startswith("cuda") else "cpu")
        manifest = policies.manifest(layout)
        policy = policies.stream(manifest, config.seed, device)
        num_sequences, length = _CALIBRATION
        batch = (
            _prompts(num_sequences, min(length, config.max_length), f"{config.seed} calibration")
            if precision is Precision.FP8_KV
            else None
        )
        refitter.refit(policy, manifest=manifest, calibration=batch)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return layout


def _time(
    engine: RolloutEngine, config: RolloutBenchConfig, precision: Precision, case: tuple[int, int, int]
) -> RolloutTiming:
    batch, length, num_new = case
    runs = count()

    def seconds(num_tokens: int) -> float:
        prompts = _prompts(batch, length, f"{config.seed} {case} {next(runs)}")
        start_s = time.perf_counter()
        with booting(config.engine, config.model, act="generate with"):
            engine.generate(prompts, num_tokens)
        return time.perf_counter() - start_s

    def timed(num_tokens: int) -> list[float]:
        found: list[float] = []
        while len(found) < config.repeats and not (found and sum(found) > (config.case_seconds or math.inf)):
            found.append(seconds(num_tokens))
        return found

    seconds(min(num_new, _WARM_UP_TOKENS))
    whole_s = timed(num_new)
    return RolloutTiming(
        precision=precision,
        batch_size=batch,
        context_length=length,
        num_new_tokens=num_new,
        tokens_per_s=Percentiles.of([batch * num_new / taken_s for taken_s in whole_s]),
        prefill_s=Percentiles.of(timed(1)),
        against_bf16=None,
    )


def _against_bf16(timings: Sequence[RolloutTiming]) -> tuple[RolloutTiming, ...]:
    """Compare each timing with BF16's in the same case, if there is one."""
    base = {timing.case: timing.tokens_per_s.median for timing in timings if timing.precision is Precision.BF16}
    ratios = (timing.tokens_per_s.median / base[timing.case] if timing.case in base else None for timing in timings)
    return tuple(
        timing.model_copy(update={"against_bf16": ratio}) for timing, ratio in zip(timings, ratios, strict=True)
    )


def _prompts(num_prompts: int, length: int, about: str) -> list[list[int]]:
    """Return random ids, seeded by what `about` says they are for."""
    generator = torch.Generator().manual_seed(zlib.crc32(about.encode()))
    return torch.randint(_FIRST_TOKEN, _FIRST_TOKEN + _NUM_TOKENS, (num_prompts, length), generator=generator).tolist()
