"""An engine of two ranks in processes of their own, to which policies are broadcast; beside it the same by ordinary refits."""

import time
from functools import partial
from pathlib import Path

import torch
from attempts import note_calls
from engines import make_policy
from subject import NOISE, Subject, booted_as

from fp8refit import Broadcaster, gathered
from tests.outliers import BATCH
from tests.wire_bytes import num_bytes_sent, num_bytes_to

FAMILY, KERNEL = "qwen2_wide", "ue8m0"
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"
TIMEOUT_S = 20.0


def run_broadcast(work: str) -> dict:
    """Policy 1 by an ordinary refit, 2 by a broadcast, both again the other way round; what goes wrong; and a rank killed."""
    policies = {seed: make_policy(FAMILY, seed) for seed in (1, 2)}
    with booted_as("tensor parallel", Path(work) / f"{FAMILY}-bf16", KERNEL, **NOISE) as subject:
        llm = subject.llm
        found: dict = {"ordinary": {}, "broadcast": {}}
        broadcaster = Broadcaster([llm], timeout_s=TIMEOUT_S)
        wide = Broadcaster([llm], timeout_s=TIMEOUT_S, collective={"wire": "bf16"})
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
        found["steady"] = try_steady(subject, broadcaster, wide, policies)
        wide.push(policies[1])
        found["bf16"] = subject.live()
        found["kv"] = try_kv_scales(subject, broadcaster, policies[2])
        bad = dict(policies[2])
        bad[DOWN_PROJ] = bad[DOWN_PROJ].clone()
        bad[DOWN_PROJ][3, -1] = torch.nan
        found["nan"] = {
            "push": subject.refused(broadcaster.push, bad),
            "dirty": broadcaster.is_dirty,
            "generate": subject.refused(subject.generate),
        }
        broadcaster.push(policies[2])
        found["nan"]["healed"] = subject.live()

        def gives_out():
            yield from list(policies[1].items())[:5]
            raise OSError("the disk is gone")

        manifest = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in policies[1].items()}
        found["source"] = subject.refused(lambda: broadcaster.push(gives_out(), manifest=manifest))
        broadcaster.push(policies[1])
        found["source"]["healed"] = subject.live()
        subject.look("arm", 1, "die")
        start_s = time.monotonic()
        found["killed"] = subject.refused(broadcaster.push, policies[2])
        found["killed"]["seconds"] = time.monotonic() - start_s
        found["killed"]["generate"] = subject.refused(subject.generate)
        return found


def try_steady(subject: Subject, broadcaster: Broadcaster, wide: Broadcaster, policies: dict) -> dict:
    """Policies that are laid out as the last one; and one after another trainer came between."""
    found = {seed: note_calls(subject, partial(broadcaster.push, policy)) for seed, policy in policies.items()}
    wide.push(policies[1])
    found["after another trainer"] = note_calls(subject, partial(broadcaster.push, policies[2]))
    return found


def try_kv_scales(subject: Subject, broadcaster: Broadcaster, policy: dict) -> dict:
    """Scales measured after an ordinary refit and after broadcasts, given to one, and sent with another."""
    report = subject.refit(policy, calibration=BATCH)
    found: dict = {"ordinary": subject.state() | {"scales": report.kv.scales, "copies": subject.look("kv_scales")}}
    ones = dict.fromkeys(report.kv.scales, 1.0)
    tensors = {name: torch.tensor(scale) for name, scale in report.kv.scales.items()}
    ways = {
        "calibration": lambda: broadcaster.push(policy, calibration=BATCH),
        "calibration of what is gathered": lambda: broadcaster.push(gathered(policy), calibration=BATCH),
        "kv_scales": lambda: broadcaster.push(policy, kv_scales=report.kv.scales),
        "among the weights": lambda: broadcaster.push({**tensors, **policy}),
    }
    for name, push in ways.items():
        broadcaster.push(policy, kv_scales=ones)
        pushed = push()
        found[name] = subject.state() | {"scales": pushed.kv.scales, "copies": subject.look("kv_scales")}
    armed = subject.look("arm_measuring", subject.num_ranks - 1)
    found["fault"] = {"armed": armed, "push": subject.refused(broadcaster.push, policy, calibration=BATCH)}
    found["fault"]["generate"] = subject.refused(subject.generate)
    broadcaster.push(policy)
    found["healed"] = subject.state() | {"scales": report.kv.scales, "copies": subject.look("kv_scales")}
    broadcaster.push(policy, kv_scales=ones)
    return found
