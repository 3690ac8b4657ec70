"""Engines of every layout, updated from within their workers. `test_updates.py` says what must come of it."""

from pathlib import Path

from engines import PROMPTS, SAMPLING, make_policy
from subject import LAYOUTS, NOISE, Subject, booted_as

from fp8refit import Refitter
from tests.engines.updates import try_updates

LAYOUTS["in process"] = {}


def run_updates(layout: str, family: str, model: str) -> dict:
    with booted_as(layout, Path(model), "fp32", **NOISE) as subject:
        found = try_updates(subject, subject.llm, family) | {"layout": layout}
        found["kept"] = try_kept(subject, family)
        found["flipped"] = try_flipped(subject, family)
        return found | {"running": try_running(subject, family)}


def try_kept(subject: Subject, family: str) -> dict:
    """What is frozen is kept from policy to policy, but not through a deep sleep, which on a CPU changes nothing."""
    policy = {name: tensor for name, tensor in make_policy(family, 1).items() if not name.endswith("norm.weight")}
    before = subject.state()
    report = subject.refit(policy, keep=("*norm.weight",))
    found = {"kept": report.kept, "same": subject.state() == before}
    subject.call("sleep", 2)
    found["slept"] = subject.refused(subject.refit, policy, keep=("*norm.weight",))
    found["untouched"] = subject.state() == before
    subject.refit(make_policy(family, 1))
    found["again"] = subject.refit(policy, keep=("*norm.weight",)).kept
    return found


def try_flipped(subject: Subject, family: str) -> dict:
    """What differs after a bit flipped on the last rank."""
    subject.refit(make_policy(family, 1))
    subject.look("flip", subject.num_ranks - 1)
    return Refitter(subject.llm).verify(make_policy(family, 1)).differing


def try_running(subject: Subject, family: str) -> dict:
    """A request that runs while an update comes goes on under the new policy, or ends with an error; it does not hang."""
    subject.engine.add_request("running", {"prompt_token_ids": PROMPTS[0]}, SAMPLING)
    subject.engine.step()
    updated = subject.look("update", family, 2, "buckets")
    done = []
    while subject.engine.has_unfinished_requests():
        done += [output for output in subject.engine.step() if output.finished]
    return {"updated": updated, "num_done": len(done)}
