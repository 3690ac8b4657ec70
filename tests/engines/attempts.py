"""Policies, sources and faults of an engine of any number of ranks. An attempt gives what it found; the next refit heals it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fp8refit import gathered
from tests.engines.subject import Subject, make_policy

DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"
LAST_COLUMN = -1
"""Of `DOWN_PROJ`: under tensor parallelism the last rank alone holds it."""


def bad_policy(family: str) -> dict[str, Tensor]:
    """Policy 2 with a NaN that the last rank alone can see."""
    policy = make_policy(family, 2)
    policy[DOWN_PROJ] = policy[DOWN_PROJ].clone()
    policy[DOWN_PROJ][3, LAST_COLUMN] = torch.nan
    return policy


def try_policies(subject: Subject, family: str, *observed: str) -> dict:
    """Policy 1, 2 and 1 again, over noise.

    Args:
        subject: The engine.
        family: Of models.
        *observed: What else is looked at, when it was booted and after each refit.
    """
    before, booted = subject.look("places"), {what: subject.look(what) for what in observed}
    rounds = []
    for seed in (1, 2, 1):
        report = subject.refit(make_policy(family, seed))
        after_refit = {"version": report.version, "ranks": [rank.rank for rank in report.ranks]}
        # Not after `state`: the cache must be empty because of the refit, not of the test.
        after_refit |= {"live": subject.live(), "outputs": subject.generate(), "again": subject.generate()}
        rounds.append(after_refit | {what: subject.look(what) for what in observed})
    after = subject.look("places")
    return {
        "booted": booted,
        "rounds": rounds,
        "num_tensors": [len(places) for places in before],
        "moved": [[n for n in one if one[n] != two.get(n)] for one, two in zip(before, after, strict=True)],
        "traces": subject.traces,
    }


def try_sources(subject: Subject, family: str, bf16: Path, fp8: Path) -> dict:
    """Policy 1 as tensors, files and streams, each over other bytes, through small buckets."""
    policy = make_policy(family, 1)
    manifest = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in policy.items()}
    sources: dict[str, tuple[Any, Any]] = {
        "mapping": (policy, None),
        "safetensors": (bf16, None),
        "block-FP8 safetensors": (fp8, None),
        "function": (lambda: iter(policy.items()), None),
        "one-shot iterator": (iter(policy.items()), None),
        "one-shot iterator with manifest": (iter(policy.items()), manifest),
        "gathered": (gathered(policy), None),
        "fp32": ({name: tensor.float() for name, tensor in policy.items()}, None),
        "wrapped names": ({f"module._orig_mod.{name}": tensor for name, tensor in policy.items()}, None),
    }
    found: dict[str, Any] = {"largest_bytes": max(tensor.nbytes for tensor in policy.values()), "live": {}}
    for kind, (source, announced) in sources.items():
        subject.look("scribble")
        subject.refit(source, manifest=announced, bucket_bytes=1 << 20)
        found["live"][kind] = subject.live()
    return found


def after_failure(subject: Subject, before: list[dict[str, str]]) -> dict:
    """What a failed refit left: on which ranks bytes changed, and whether requests are admitted."""
    return {
        "dirty": subject.is_dirty,
        "changed": [one != two for one, two in zip(before, subject.live(), strict=True)],
        "entries": {name: subject.refused(enter) for name, enter in subject.entries.items()},
        "num_unfinished": subject.num_unfinished,
    }


def try_rank_fault(subject: Subject, family: str, work: Path) -> dict:
    """The last rank fails after its slots were written."""
    before = subject.live()
    armed = subject.look("arm", subject.num_ranks - 1, "fail")
    found = {"armed": armed, "refit": subject.refused(subject.refit, make_policy(family, 2))}
    return found | after_failure(subject, before)


def try_bad_values(subject: Subject, family: str, work: Path) -> dict:
    """NaN that one rank sees, in the pass that writes."""
    before = subject.live()
    found = {"refit": subject.refused(subject.refit, bad_policy(family))}
    return found | after_failure(subject, before)


def try_strict(subject: Subject, family: str, work: Path) -> dict:
    """The same, looked for before: in tensors, and in files that every rank reads for itself."""
    file = work / f"bad-{os.getpid()}.safetensors"
    policy = bad_policy(family)
    save_file({name: tensor.clone() for name, tensor in policy.items()}, file)
    before = subject.state()
    found: dict[str, Any] = {"refit": subject.refused(subject.refit, policy, validate="strict")}
    found["files"] = subject.refused(subject.refit, file, validate="strict")
    return found | {"dirty": subject.is_dirty, "untouched": subject.state() == before}


ATTEMPTS: dict[str, Callable[[Subject, str, Path], dict]] = {
    "rank fault": try_rank_fault,
    "bad values": try_bad_values,
    "strict": try_strict,
}
