"""What can go wrong only where every rank has a driver of its own (`external_launcher`): drivers that do not do the same."""

import os
from pathlib import Path

import torch
import torch.distributed
from attempts import DOWN_PROJ, NORM, after_failure
from engines import make_policy
from subject import Subject


def is_last() -> bool:
    return os.environ["RANK"] == "1"


class Gathered:
    """A trainer's stream, each tensor of which takes a collective operation of all ranks."""

    def __init__(self, family: str, group: torch.distributed.ProcessGroup, *, wrong: str | None = None) -> None:
        self.policy = make_policy(family, 2)
        self.manifest = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.policy.items()}
        self.group = group
        self.wrong = wrong
        self.num_given = 0

    def __call__(self):
        for name, tensor in self.policy.items():
            torch.distributed.all_reduce(torch.ones(1), group=self.group)
            self.num_given += 1
            yield name, tensor[:1] if name == self.wrong else tensor


def try_missing_on_one_rank(subject: Subject, family: str, work: Path) -> dict:
    policy = make_policy(family, 2)
    if is_last():
        del policy[NORM]
    before = subject.state()
    found = {"refit": subject.refused(subject.refit, policy), "dirty": subject.is_dirty}
    return found | {"untouched": subject.state() == before}


def try_nan_on_one_rank(subject: Subject, family: str, work: Path) -> dict:
    """In a tensor that both ranks hold, but of one driver's state dict only."""
    policy = make_policy(family, 2)
    if is_last():
        policy[NORM] = torch.full_like(policy[NORM], torch.nan)
    before = subject.state()
    found = {"strict": subject.refused(subject.refit, policy, validate="strict")}
    found["untouched"] = subject.state() == before and not subject.is_dirty
    found["refit"] = subject.refused(subject.refit, policy)
    return found | after_failure(subject, before["live"])


def try_busy_on_one_rank(subject: Subject, family: str, work: Path) -> dict:
    """An unfinished request on the first rank; the trainer's stream is a collective operation."""
    source = Gathered(family, torch.distributed.new_group(backend="gloo"))
    before = subject.state()
    if not is_last():
        subject.add_request()
    found = {"refit": subject.refused(subject.refit, source, manifest=source.manifest), "num_given": source.num_given}
    found["without_manifest"] = subject.refused(subject.refit, source)
    found |= {"num_given_without": source.num_given, "dirty": subject.is_dirty}
    if not is_last():
        subject.engine.abort_request(["late"])
    return found | {"untouched": subject.state() == before}


def try_mismatch_in_mid_stream(subject: Subject, family: str, work: Path) -> dict:
    """One rank is given a tensor that is not what was announced, while the other's stream goes on."""
    source = Gathered(family, torch.distributed.new_group(backend="gloo"), wrong=DOWN_PROJ if is_last() else None)
    before = subject.live()
    found = {"refit": subject.refused(subject.refit, source, manifest=source.manifest)}
    found |= {"num_given": source.num_given, "num_announced": len(source.manifest)}
    return found | after_failure(subject, before)


def try_gathered(subject: Subject, family: str, work: Path) -> dict:
    """The same stream, whole."""
    source = Gathered(family, torch.distributed.new_group(backend="gloo"))
    subject.refit(source, manifest=source.manifest)
    live = subject.live()
    subject.refit(make_policy(family, 2))
    return {"equal": live == subject.live(), "num_given": source.num_given}


LAUNCHER_ATTEMPTS = {
    "missing on one rank": try_missing_on_one_rank,
    "NaN on one rank": try_nan_on_one_rank,
    "busy on one rank": try_busy_on_one_rank,
    "mismatch in mid-stream": try_mismatch_in_mid_stream,
    "gathered": try_gathered,
}
