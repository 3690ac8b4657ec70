"""Real engines in every process layout: what each holds after refits, what a fresh one of its kind holds, and how it ends.

An ending takes the engine down for good, so it comes last.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed
from async_engine import ASYNC_ATTEMPTS
from engines import make_policy
from kv_layouts import KV_ATTEMPTS
from launcher_engine import LAUNCHER_ATTEMPTS
from processes import shared_files
from subject import NOISE, Subject, booted_as

from fp8refit import Refitter
from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.remote.protocol import channel
from fp8refit.remote.protocol.messages import Reply, Request
from tests.engines.attempts import ATTEMPTS, try_policies, try_sources


def run_layout(
    layout: str, family: str, kernel: str, work: str, ending: str, fp8: str, note: Callable[[dict], None]
) -> dict:
    """One engine from noise through policies, sources and faults, to its end."""
    folder = Path(work)
    with booted_as(layout, folder / f"{family}-bf16-1", kernel, **NOISE) as subject:
        found: dict[str, Any] = {"policies": try_policies(subject, family, "padding", "kv_scales")}
        described = subject.layout()
        found["layout"] = described.model_dump(mode="json")
        good = subject.state()
        found["good"] = good
        own = OWN_ATTEMPTS.get(layout, {"late interrupt": try_late_interrupt})
        attempts = {**ATTEMPTS, **own, **KV_ATTEMPTS.get(layout, {})}
        for name, attempt in attempts.items():
            start_s = time.perf_counter()
            found[name] = attempt(subject, family, folder)
            found[name]["seconds"] = time.perf_counter() - start_s
            subject.refit(make_policy(family, 1))
            found[name]["healed"] = subject.state() == good and not subject.is_dirty and subject.traces == []
        # Every driver of an external launcher makes its own.
        bf16, made = folder / f"{family}-bf16-1", Path(f"{fp8}-{os.getpid()}")
        quantize_checkpoint(bf16, made, like=described)
        found["sources"] = try_sources(subject, family, bf16, made)
        found["ending"] = end(subject, family, ending, note=lambda ending: note(found | {"ending": ending}))
        return found


def try_late_interrupt(subject: Subject, family: str, work: Path) -> dict:
    """Control-C in the driver when every rank has written and committed, and the driver has not heard of it."""
    policy, version = make_policy(family, 2), subject.version
    read = channel._replies

    def lose_the_last(answers: Sequence[str], request: Request) -> list[Reply]:
        replies = read(answers, request)
        if any(reply.reports for reply in replies):
            raise KeyboardInterrupt
        return replies

    raised = None
    with patch.object(channel, "_replies", lose_the_last):
        try:
            subject.refit(policy)
        except BaseException as error:  # noqa: BLE001 - ours or not
            raised = type(error).__name__
    found: dict[str, Any] = {"raised": raised, "dirty": subject.is_dirty, "versions": [version, subject.version]}
    found["written"] = subject.state()
    subject.refit(policy)
    return found | {"again": subject.state()}


OWN_ATTEMPTS = {"asynchronous": ASYNC_ATTEMPTS, "replicas": ASYNC_ATTEMPTS, "external launcher": LAUNCHER_ATTEMPTS}
"""Instead of a late interrupt: a task is cancelled, and a rank beside its driver answers nobody."""


def run_fresh_layout(
    layout: str,
    family: str,
    kernel: str,
    work: str,
    checkpoint: str,
    ending: str,
    options: dict[str, Any],
    note: Callable[[dict], None],
) -> dict:
    """An engine that loads the block-FP8 checkpoint of policy 2. After that was looked at, it may be refitted, and ends."""
    with booted_as(layout, Path(checkpoint), kernel, **options) as subject:
        found: dict[str, Any] = {"fresh": subject.state(), "kv_scales": subject.look("kv_scales")}
        found["ending"] = end(subject, family, ending, note=lambda ending: note(found | {"ending": ending}))
        return found


def end(subject: Subject, family: str, ending: str, *, note: Callable[[dict], None]) -> dict:
    """Take an engine down."""
    return ENDINGS[ending](subject, family, note)


def after_loss(subject: Subject, family: str, lose: Callable[[], None] | None = None) -> dict:
    """What refits and requests say while an engine is lost, or is being lost."""
    policy = make_policy(family, 2)
    if lose is not None:
        lose()
    found = {"refit": subject.refused(subject.refit, policy), "again": subject.refused(subject.refit, policy)}
    found |= {"dirty": subject.is_dirty, "generate": subject.refused(subject.generate)}
    return found | {"add_request": subject.refused(subject.add_request), "close": subject.refused(subject.close)}


def end_by_refusal(subject: Subject, family: str, note: Callable) -> dict:
    """The workers have no method of ours."""
    found = {"refit": subject.refused(Refitter, subject.llm), "traces": subject.traces}
    return found | {"state": subject.state()}


def end_by_refitting_again(subject: Subject, family: str, note: Callable) -> dict:
    """Policy 1, and policy 2 again."""
    states = []
    for seed in (1, 2):
        subject.refit(make_policy(family, seed))
        states.append(subject.state())
    return {"states": states}


def end_by_worker_killed_while_idle(subject: Subject, family: str, note: Callable) -> dict:
    subject.refit(make_policy(family, 1))
    victim = subject.look("pids")[-1][0]
    return after_loss(subject, family, lambda: os.kill(victim, signal.SIGKILL))


def end_by_worker_killed_while_it_writes(subject: Subject, family: str, note: Callable) -> dict:
    subject.look("arm", subject.num_ranks - 1, "die")
    return after_loss(subject, family)


def end_by_a_method_that_raises(subject: Subject, family: str, note: Callable) -> dict:
    try:
        subject.call("raise_in_worker")
        raised = None
    except Exception as error:  # noqa: BLE001
        raised = repr(error)
    return {"raised": raised} | after_loss(subject, family)


def end_by_driver_killed(subject: Subject, family: str, note: Callable) -> dict:
    """This process dies when every slot is written, before the ranks vote on that; `note` is all that it leaves."""
    before = shared_files()
    subject.refit(make_policy(family, 1))
    note({"shared_files": [before, shared_files()]})
    subject.look("arm", subject.num_ranks - 1, "die", os.getpid())
    subject.refit(make_policy(family, 2))
    time.sleep(10)
    raise AssertionError("outlived SIGKILL")


def end_by_first_rank_killed(subject: Subject, family: str, note: Callable) -> dict:
    """One driver of two, and the rank beside it, dies when its slots are written, before the ranks vote on that."""
    if os.environ["RANK"] == "1":
        return after_loss(subject, family)
    note({})
    subject.look("arm", 0, "die")
    subject.refit(make_policy(family, 2))
    raise AssertionError("outlived SIGKILL")


def end_by_last_rank_gone(subject: Subject, family: str, note: Callable) -> dict:
    """One driver of two is gone before a refit begins, and after the other has heard all that it said."""
    store = torch.distributed.distributed_c10d._get_default_store()
    if os.environ["RANK"] == "1":
        store.wait(["survivor is ready"])
        note({})
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("survivor is ready", "yes")
    return {**after_loss(subject, family), "live": subject.live()}


ENDINGS = {
    "refused": end_by_refusal,
    "refitted again": end_by_refitting_again,
    "worker killed while idle": end_by_worker_killed_while_idle,
    "worker killed while it writes": end_by_worker_killed_while_it_writes,
    "another method raises": end_by_a_method_that_raises,
    "driver killed": end_by_driver_killed,
    "first rank killed": end_by_first_rank_killed,
    "last rank gone": end_by_last_rank_gone,
}
