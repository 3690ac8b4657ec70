"""One engine from noise through policies, sources and faults, and what it holds and says after each."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sglang
from calibrations import BATCH, calibrate
from engines import bf16_of, booted_noise, generate, look, make_policy
from fp8refit_sglang.worker import FLUSH
from safetensors.torch import load_file
from subject import Subject

from fp8refit import Broadcaster, Refitter
from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.transport.loopback import Switchboard
from tests import cross_engine
from tests.engines.attempts import ATTEMPTS, try_policies, try_sources


def run_refits(family: str, num_ranks: int, work: Path) -> dict:
    """Policies over noise, then every kind of source, then every attempt and the refit that heals it."""
    with booted_noise(family, work, num_ranks) as engine:
        subject = Subject(engine)
        found: dict[str, Any] = {"policies": try_policies(subject, family, "padding")}
        found["broadcasts"] = try_broadcasts(engine, family)
        bf16, fp8 = bf16_of(family, 1, work), work / f"{family}-{num_ranks}-fp8-1"
        quantize_checkpoint(bf16, fp8, like=Refitter(engine).layout())
        found["sources"] = try_sources(subject, family, bf16, fp8)
        subject.refit(make_policy(family, 1))
        good = subject.state()
        for name, attempt in ATTEMPTS.items():
            found[name] = attempt(subject, family, work)
            subject.refit(make_policy(family, 1))
            found[name]["healed"] = subject.state() == good and not subject.is_dirty
        if family == cross_engine.FAMILY and num_ranks == 1:
            found["cross engine"] = try_cross_engine(engine, work)
        found["no FP8 cache"] = subject.refused(subject.refit, make_policy(family, 2), calibration=BATCH)
        found["calibration"] = calibrate(engine, family)
        return found


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


def try_cross_engine(engine: sglang.Engine, work: Path) -> dict:
    """The policy to which every engine is refitted."""
    Refitter(engine).refit(cross_engine.make_policy())
    look(engine, "save", str(work))
    return {"digest": cross_engine.digest_of(cross_engine.as_checkpoint(load_file(work / "0.safetensors")))}
