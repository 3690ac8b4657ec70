"""An engine of two ranks in processes of their own, to which policies are broadcast; beside it the same by ordinary refits."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engines import make_policy
from subject import NOISE, Subject, booted_as
from vllm.v1.engine import EngineCoreRequestType

from fp8refit import Broadcaster, RefitReport
from tests.outliers import BATCH
from tests.wire_bytes import num_bytes_sent, num_bytes_to

FAMILY, KERNEL = "qwen2_wide", "ue8m0"
TIMEOUT_S = 20.0
LAST = "model.layers.1.mlp.down_proj.weight"


def run_broadcast(work: str) -> dict:
    """Policies by ordinary refits and by broadcasts; KV scales; and a rank that is killed."""
    policies = {seed: make_policy(FAMILY, seed) for seed in (1, 2)}
    with booted_as("tensor parallel", Path(work) / f"{FAMILY}-bf16", KERNEL, **NOISE) as subject:
        llm = subject.llm
        found: dict = {"ordinary": {}, "broadcast": {}}
        broadcaster = Broadcaster([llm], timeout_s=TIMEOUT_S)
        other = Broadcaster([llm], timeout_s=TIMEOUT_S)
        for seed, policy in policies.items():
            subject.refit(policy)
            found["ordinary"][seed] = subject.state()
        for seed, policy in policies.items():
            report = broadcaster.push(policy)
            found["broadcast"][seed] = subject.state() | {"version": report.version, "is_first": report.is_first}
        sender = broadcaster._refitter._engine.ranks._broadcast._plan.sender
        found["num_bytes"] = {
            "sent": num_bytes_sent(sender),
            "received": [num_bytes_to(sender, rank) for rank in (0, 1)],
        }
        found["steady"] = try_steady(subject, broadcaster, other, policies)
        found["ahead"] = try_ahead(subject, policies)
        found["kv"] = try_kv_scales(subject, broadcaster, policies[2])
        subject.look("arm", 1, "die")
        start_s = time.monotonic()
        found["killed"] = subject.refused(broadcaster.push, policies[2])
        found["killed"]["seconds"] = time.monotonic() - start_s
        found["killed"]["generate"] = subject.refused(subject.generate)
        return found


def try_ahead(subject: Subject, policies: dict[int, Any]) -> dict[str, Any]:
    """Policies that are sent before requests are paused, and one with NaN between them."""
    with Broadcaster([subject.llm], timeout_s=TIMEOUT_S, collective={"stage": "ahead"}) as broadcaster:
        found: dict[str, Any] = {}
        for seed, policy in policies.items():
            report = broadcaster.push(policy)
            found[seed] = subject.state() | {"phases": list(report.phases_s)}
            bad = policy[LAST].clone().view(-1).index_fill(0, torch.tensor([0]), float("nan")).view_as(policy[LAST])
            found[seed]["refused"] = subject.refused(broadcaster.push, policy | {LAST: bad})
            found[seed]["kept"] = subject.state()
        return found


def note_calls(subject: Subject, push: Callable[[], RefitReport]) -> dict:
    """What a broadcast calls in an engine core of another process, and what the ranks hold after it."""
    client, calls, start_s = subject.engine.engine_core, [], time.monotonic()
    send = client._send_input

    def note(kind: EngineCoreRequestType, request: Any) -> None:
        if kind is EngineCoreRequestType.UTILITY:
            calls.append(request[2])
        send(kind, request)

    client._send_input = note
    report = push()
    del client._send_input
    waits = [rank.flush_s > 0 for rank in report.ranks]
    return {"calls": calls, "waits_for_flush": waits, "seconds": time.monotonic() - start_s, **subject.state()}


def try_steady(subject: Subject, broadcaster: Broadcaster, other: Broadcaster, policies: dict) -> dict:
    """Policies that are laid out as the last one; and one after another trainer came between."""
    found = {seed: note_calls(subject, partial(broadcaster.push, policy)) for seed, policy in policies.items()}
    other.push(policies[1])
    found["after another trainer"] = note_calls(subject, partial(broadcaster.push, policies[2]))
    return found


def try_kv_scales(subject: Subject, broadcaster: Broadcaster, policy: dict) -> dict:
    """Scales measured after an ordinary refit, and over scales of 1 after a broadcast."""
    report = subject.refit(policy, calibration=BATCH)
    found = {"ordinary": subject.state() | {"scales": report.kv.scales, "copies": subject.look("kv_scales")}}
    broadcaster.push(policy, kv_scales=dict.fromkeys(report.kv.scales, 1.0))
    pushed = broadcaster.push(policy, calibration=BATCH)
    return found | {"broadcast": subject.state() | {"scales": pushed.kv.scales, "copies": subject.look("kv_scales")}}
