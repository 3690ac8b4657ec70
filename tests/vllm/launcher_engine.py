"""What can go wrong only where every rank has a driver of its own (`external_launcher`): drivers that do not do the same."""

import os
from pathlib import Path

import torch
import torch.distributed
from engines import make_policy
from subject import Subject


def is_last() -> bool:
    return os.environ["RANK"] == "1"


class Gathered:
    """A trainer's stream, each tensor of which takes a collective operation of all ranks."""

    def __init__(self, family: str, group: torch.distributed.ProcessGroup) -> None:
        self.policy = make_policy(family, 2)
        self.manifest = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.policy.items()}
        self.group = group
        self.num_given = 0

    def __call__(self):
        for name, tensor in self.policy.items():
            torch.distributed.all_reduce(torch.ones(1), group=self.group)
            self.num_given += 1
            yield name, tensor


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


def try_gathered(subject: Subject, family: str, work: Path) -> dict:
    """The same stream, whole."""
    source = Gathered(family, torch.distributed.new_group(backend="gloo"))
    subject.refit(source, manifest=source.manifest)
    live = subject.live()
    subject.refit(make_policy(family, 2))
    return {"equal": live == subject.live(), "num_given": source.num_given}


LAUNCHER_ATTEMPTS = {
    "busy on one rank": try_busy_on_one_rank,
    "gathered": try_gathered,
}
