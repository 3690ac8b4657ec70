"""Calibration of FP8 KV caches over two ranks, and beside requests that run. `test_kv_layouts.py` says what must come of it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_engine import LONG, TIMEOUT_S, outcome, refit_under_way
from engines import PROMPTS
from subject import AsyncSubject, Subject

from fp8refit import KvConfig, Refitter
from tests.engines.attempts import after_failure
from tests.outliers import BATCH, calm_policy, with_outliers
from tests.tiny_models import COMMON


def policy_of(family: str) -> dict:
    """Policy 2 with keys and values of different sizes."""
    return with_outliers(calm_policy(family, 2))


def reset(subject: Subject, family: str) -> None:
    """Scales of 1, as every attempt finds them."""
    names = [f"model.layers.{index}.self_attn" for index in range(COMMON["num_hidden_layers"])]
    scales = {f"{name}.{kind}_scale": 1.0 for name in names for kind in ("k", "v")}
    subject.refit(calm_policy(family, 2), kv_scales=scales)


def try_calibration(subject: Subject, family: str, work: Path) -> dict:
    """With a policy, and again without."""
    before = subject.look("places")
    report = subject.refit(policy_of(family), calibration=BATCH)
    found: dict[str, Any] = {"report": report.kv.model_dump(), "copies": subject.look("kv_scales")}
    found["ranks"] = [rank.kv.scales for rank in report.ranks]
    subject.refit(calm_policy(family, 2))
    found["carried"] = subject.look("kv_scales") == found["copies"]
    subject.refit(policy_of(family))
    version, held = subject.version, subject.live()
    again = subject.calibrate(BATCH)
    found["again"] = {
        "report": again.model_dump(),
        "copies": subject.look("kv_scales"),
        "version": subject.version - version,
        "live": subject.live() == held,
    }
    found |= {"moved": subject.look("places") != before, "traces": subject.traces}
    reset(subject, family)
    return found


def try_each_rank_for_itself(subject: Subject, family: str, work: Path) -> dict:
    report = subject.refit(policy_of(family), calibration=BATCH, kv=KvConfig(reduction="rank"))
    found = {"ranks": [rank.kv.scales for rank in report.ranks], "copies": subject.look("kv_scales")}
    reset(subject, family)
    return found


def try_rank_fault(subject: Subject, family: str, work: Path) -> dict:
    """The last rank fails after its pass, in which every rank took part."""
    before, scales = subject.live(), subject.look("kv_scales")
    armed = subject.look("arm_measuring", subject.num_ranks - 1)
    found = {"armed": armed, "refit": subject.refused(subject.refit, policy_of(family), calibration=BATCH)}
    found |= after_failure(subject, before)
    found["calibrate"] = subject.refused(subject.calibrate, BATCH)
    return found | {"scales_untouched": subject.look("kv_scales") == scales}


def try_in_flight(subject: AsyncSubject, family: str, work: Path) -> dict:
    """A refit with calibration while requests run that are kept."""
    steps = refit_under_way(subject, policy_of(family), BATCH, in_flight="keep")
    found = subject.run(steps) | {"copies": subject.look("kv_scales")}
    reset(subject, family)
    return found


def try_alone_in_flight(subject: AsyncSubject, family: str, work: Path) -> dict:
    """Calibration without weights while a request runs that is kept."""

    async def steps() -> dict:
        started = asyncio.Event()
        running = asyncio.create_task(subject.answer(PROMPTS[0], LONG, started=started))
        await asyncio.wait_for(started.wait(), TIMEOUT_S)
        report = await Refitter(subject.llm, in_flight="keep").calibrate_async(BATCH)
        found: dict[str, Any] = {"was_running": not running.done(), "scales": report.scales}
        await asyncio.wait([running], timeout=TIMEOUT_S)
        return found | {"running": outcome(running)}

    subject.refit(policy_of(family))
    version = subject.version
    found = subject.run(steps()) | {"copies": subject.look("kv_scales"), "version": version}
    found |= {"traces": subject.traces, "num_unfinished": subject.num_unfinished}
    reset(subject, family)
    return found


KV_ATTEMPTS: dict[str, dict[str, Callable[..., dict]]] = {
    "tensor parallel": {
        "kv: calibration": try_calibration,
        "kv: each rank for itself": try_each_rank_for_itself,
        "kv: rank fault": try_rank_fault,
    },
    "asynchronous": {
        "kv: calibration": try_calibration,
        "kv: in flight": try_in_flight,
        "kv: alone in flight": try_alone_in_flight,
    },
}
