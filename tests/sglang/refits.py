"""One engine from noise through policies, sources and faults, and what it holds and says after each."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sglang
import torch
from calibrations import BATCH, calibrate
from engines import (
    PROMPTS,
    SAMPLING,
    bf16_of,
    booted_noise,
    generate,
    look,
    make_policy,
    num_ranks_of,
    num_unfinished,
    state,
    traces,
)
from fp8refit_sglang.worker import FLUSH
from safetensors.torch import load_file
from torch import Tensor

from fp8refit import Broadcaster, Refitter, gathered
from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.transport.loopback import Switchboard
from tests import cross_engine

NORM = "model.layers.0.input_layernorm.weight"
UP_PROJ = "model.layers.1.mlp.up_proj.weight"
LAST_ROW = -1
"""Of `UP_PROJ`: under tensor parallelism the last rank alone holds it."""


def run_refits(family: str, num_ranks: int, work: Path) -> dict:
    """Policies over noise, then every kind of source, then every attempt and the refit that heals it."""
    with booted_noise(family, work, num_ranks) as engine:
        found: dict[str, Any] = {"policies": try_policies(engine, family)}
        found["broadcasts"] = try_broadcasts(engine, family)
        found["sources"] = try_sources(engine, family, work)
        good = refitted(engine, family, 1)
        for name, attempt in ATTEMPTS.items():
            found[name] = attempt(engine, family, good)
            found[name]["healed"] = refitted(engine, family, 1) == good and not Refitter(engine).is_dirty
        if family == cross_engine.FAMILY and num_ranks == 1:
            found["cross engine"] = try_cross_engine(engine, work)
        found["no FP8 cache"] = refused(lambda: Refitter(engine).refit(make_policy(family, 2), calibration=BATCH))
        found["calibration"] = calibrate(engine, family)
        return found


def refitted(engine: sglang.Engine, family: str, seed: int) -> dict:
    """What the engine holds and says after a refit to policy `seed`."""
    Refitter(engine).refit(make_policy(family, seed))
    return state(engine)


def try_policies(engine: sglang.Engine, family: str) -> dict:
    """Policy 1, 2 and 1 again, over noise."""
    booted, before = {"padding": look(engine, "padding"), "traces": traces(engine)}, look(engine, "places")
    rounds = []
    for seed in (1, 2, 1):
        report = Refitter(engine).refit(make_policy(family, seed))
        after_refit = {"version": report.version, "ranks": [rank.rank for rank in report.ranks]}
        # Not after `state`: the cache must be empty because of the refit, not of the test.
        after_refit |= {"live": look(engine, "live_bytes"), "outputs": generate(engine), "again": generate(engine)}
        rounds.append(after_refit | {"padding": look(engine, "padding")})
    after = look(engine, "places")
    return {
        "booted_padding": booted["padding"],
        "rounds": rounds,
        "num_tensors": [len(places) for places in before],
        "moved": [[n for n in one if one[n] != two.get(n)] for one, two in zip(before, after, strict=True)],
        "traces": sorted(traces(engine) - booted["traces"]),
    }


def try_broadcasts(engine: sglang.Engine, family: str) -> list[dict]:
    """Policies 2, 1, 2 and 1 by one broadcaster: what ranks are asked for, what of that in one conversation, and what they hold
    and say then.
    """
    asked: list[str] = []
    tell = Switchboard._tell

    async def note(board: Switchboard, message: str, *, is_last: bool, **options: Any) -> Sequence[str]:
        step = message if message == FLUSH else json.loads(message)["order"]["step"]
        asked.append(step if is_last else f"{step} and")
        return await tell(board, message, is_last=is_last, **options)

    rounds = []
    with patch.object(Switchboard, "_tell", note), Broadcaster([engine], timeout_s=30) as broadcaster:
        for seed in (2, 1, 2, 1):
            asked.clear()
            broadcaster.push(make_policy(family, seed))
            rounds.append({"asked": list(asked), "outputs": generate(engine), "live": look(engine, "live_bytes")})
    return rounds


def try_sources(engine: sglang.Engine, family: str, work: Path) -> dict:
    """Policy 1 as tensors, files and streams, each over other bytes, through small buckets."""
    policy = make_policy(family, 1)
    bf16, fp8 = bf16_of(family, 1, work), work / f"{family}-{num_ranks_of(engine)}-fp8-1"
    quantize_checkpoint(bf16, fp8, like=Refitter(engine).layout())
    manifest = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in policy.items()}
    sources: dict[str, tuple[Any, Any]] = {
        "mapping": (policy, None),
        "safetensors": (bf16, None),
        "block-FP8 safetensors": (fp8, None),
        "function": (lambda: iter(policy.items()), None),
        "one-shot iterator": (iter(policy.items()), None),
        "one-shot iterator with manifest": (iter(policy.items()), manifest),
        "gathered": (gathered(policy), None),
    }
    found = {}
    for kind, (source, announced) in sources.items():
        look(engine, "scribble")
        Refitter(engine, bucket_bytes=1 << 20).refit(source, manifest=announced)
        found[kind] = look(engine, "live_bytes")
    return found


def try_cross_engine(engine: sglang.Engine, work: Path) -> dict:
    """The policy to which every engine is refitted."""
    Refitter(engine).refit(cross_engine.make_policy())
    look(engine, "save", str(work))
    return {"digest": cross_engine.digest_of(cross_engine.as_checkpoint(load_file(work / "0.safetensors")))}


def try_misfits(engine: sglang.Engine, family: str, good: dict) -> dict:
    """A missing, an unexpected and a misshapen tensor at once."""
    policy = make_policy(family, 2)
    policy["model.layers.9.mlp.up_proj.weight"] = policy.pop(NORM)
    policy[UP_PROJ] = policy[UP_PROJ][:128]
    found = {"refit": refused(lambda: Refitter(engine).refit(policy)), "dirty": Refitter(engine).is_dirty}
    return found | {"untouched": state(engine) == good}


def try_strict(engine: sglang.Engine, family: str, good: dict) -> dict:
    """NaN that the last rank alone can see, looked for before the first byte is written."""
    found = {"refit": refused(lambda: Refitter(engine, validate="strict").refit(bad_policy(family)))}
    return found | {"dirty": Refitter(engine).is_dirty, "untouched": state(engine) == good}


def try_bad_values(engine: sglang.Engine, family: str, good: dict) -> dict:
    """The same, in the pass that writes."""
    return {"refit": refused(lambda: Refitter(engine).refit(bad_policy(family)))} | after_failure(engine, good)


def try_rank_fault(engine: sglang.Engine, family: str, good: dict) -> dict:
    """The last rank fails when all its slots are written."""
    armed = look(engine, "arm", num_ranks_of(engine) - 1)
    refusal = refused(lambda: Refitter(engine).refit(make_policy(family, 2)))
    return {"armed": armed, "refit": refusal} | after_failure(engine, good)


ATTEMPTS: dict[str, Callable[[sglang.Engine, str, dict], dict]] = {
    "misfits": try_misfits,
    "strict": try_strict,
    "bad values": try_bad_values,
    "rank fault": try_rank_fault,
}


def bad_policy(family: str) -> dict[str, Tensor]:
    """Policy 2 with a NaN that the last rank alone holds."""
    policy = make_policy(family, 2)
    policy[UP_PROJ] = policy[UP_PROJ].clone()
    policy[UP_PROJ][LAST_ROW, 3] = torch.nan
    return policy


def after_failure(engine: sglang.Engine, good: dict) -> dict:
    """What a failed refit left: on which ranks bytes changed, and what every entry says."""
    live = look(engine, "live_bytes")
    prompt = {"input_ids": PROMPTS[0], "sampling_params": SAMPLING}
    return {
        "dirty": Refitter(engine).is_dirty,
        "changed": [one != two for one, two in zip(good["live"], live, strict=True)],
        "generate": refused(lambda: engine.generate(**prompt)),
        "stream": refused(lambda: list(engine.generate(**prompt, stream=True))),
        "async_generate": refused(lambda: engine.loop.run_until_complete(engine.async_generate(**prompt))),
        "num_unfinished": num_unfinished(engine),
    }


def refused(call: Callable[[], object]) -> dict | None:
    """Which error `call` raises, how soon, and what it names; None if it returns."""
    start_s = time.perf_counter()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever comes is what is found
        named = [getattr(error, field, ()) for field in ("names", "problems", "reasons")]
        return {
            "error": type(error).__name__,
            "message": str(error),
            "named": [line for lines in named for line in lines],
            "seconds": time.perf_counter() - start_s,
        }
    return None
