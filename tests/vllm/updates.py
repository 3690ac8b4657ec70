"""Engines of every layout, updated from within their workers. `test_updates.py` says what must come of it."""

from pathlib import Path

from engines import PROMPTS, SAMPLING, make_policy
from subject import LAYOUTS, NOISE, Subject, booted_as

from fp8refit import Refitter
from tests.updating import FAULTS, KINDS

LAYOUTS["in process"] = {}


def run_updates(layout: str, family: str, model: str) -> dict:
    with booted_as(layout, Path(model), "fp32", **NOISE) as subject:
        return try_updates(subject, family) | {"layout": layout}


def try_updates(subject: Subject, family: str) -> dict:
    subject.refit(make_policy(family, 1))
    good = subject.state()
    subject.refit(make_policy(family, 2))
    other = subject.state()
    found: dict = {"differ": good["live"] != other["live"] and good["outputs"] != other["outputs"], "kinds": {}}
    for index, kind in enumerate(KINDS):
        seed, expected = (1, good) if index % 2 == 0 else (2, other)
        subject.generate()  # so that the prefix cache holds the other policy's
        updated = subject.look("update", family, seed, kind)
        cached = num_cached(subject)
        found["kinds"][kind] = {"updated": updated, "same": subject.state() == expected, "num_cached": cached}
    found["model"] = {"updated": subject.look("update_model", family, 1), "same": subject.state() == good}
    found["faults"] = {}
    for fault in FAULTS:
        for place in range(4):
            found["faults"][f"{fault} {place}"] = try_fault(subject, family, f"{fault} {place}", good)
    subject.look("update", family, 2, "buckets", "nan 1")
    subject.refit(make_policy(family, 1))
    found["healed by a refit"] = subject.state() == good
    found["kept"] = try_kept(subject, family)
    found["verified"] = try_verify(subject, family)
    found["running"] = try_running(subject, family)
    return found


def try_fault(subject: Subject, family: str, fault: str, good: dict) -> dict:
    found = {"updated": subject.look("update", family, 2, "buckets", fault), "dirty": subject.look("dirty")}
    found["generate"] = subject.refused(subject.generate)
    found["num_unfinished"] = subject.num_unfinished
    found["healed"] = subject.look("update", family, 1, "buckets")
    found["same"] = subject.state() == good
    return found


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


def try_verify(subject: Subject, family: str) -> dict:
    """What every rank holds against its policy, against another, and after a bit flipped on the last rank."""
    subject.refit(make_policy(family, 1))
    before, refitter = subject.state(), Refitter(subject.llm)
    same, other = refitter.verify(make_policy(family, 1)), refitter.verify(iter(make_policy(family, 2).items()))
    untouched = subject.state() == before
    flipped = subject.look("flip", subject.num_ranks - 1)
    return {
        "same": same.is_equal,
        "num_other": len(other.differing),
        "num_tensors": same.num_tensors,
        "untouched": untouched,
        "flipped": flipped,
        "found": refitter.verify(make_policy(family, 1)).differing,
    }


def try_running(subject: Subject, family: str) -> dict:
    """A request that runs while an update comes goes on under the new policy, or ends with an error; it does not hang."""
    subject.engine.add_request("running", {"prompt_token_ids": PROMPTS[0]}, SAMPLING)
    subject.engine.step()
    updated = subject.look("update", family, 2, "buckets")
    done = []
    while subject.engine.has_unfinished_requests():
        done += [output for output in subject.engine.step() if output.finished]
    return {"updated": updated, "num_done": len(done)}


def num_cached(subject: Subject) -> int:
    """Tokens that the prefix cache gave to the first request after an update."""
    (output,) = subject.llm.generate({"prompt_token_ids": PROMPTS[-1]}, SAMPLING, use_tqdm=False)
    return output.num_cached_tokens
