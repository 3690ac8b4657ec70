"""Updates of an engine from within its workers or schedulers: buckets of every kind, faults in them, and what heals those."""

from typing import Any

from fp8refit import Refitter
from tests.engines.subject import UpdatedSubject, make_policy
from tests.updating import FAULTS, KINDS

PLACES = [f"{fault} {place}" for fault in FAULTS for place in range(4)]
"""A fault, and the bucket of four that has it."""


def try_updates(subject: UpdatedSubject, engine: object, family: str) -> dict:
    states = {}
    for seed in (1, 2):
        subject.refit(make_policy(family, seed))
        states[seed] = subject.state()
    differ = states[1]["live"] != states[2]["live"] and states[1]["outputs"] != states[2]["outputs"]
    found: dict[str, Any] = {"differ": differ, "kinds": {}, "faults": {}}
    for index, kind in enumerate(KINDS):
        seed = 1 + index % 2
        updated = subject.update("update", family, seed, kind)
        cached = subject.num_cached()
        found["kinds"][kind] = {"updated": updated, "num_cached": cached, "same": subject.state() == states[seed]}
    found["model"] = {"updated": subject.update("update_model", family, 1), "same": subject.state() == states[1]}
    for fault in PLACES:
        found["faults"][fault] = {
            "updated": subject.update("update", family, 2, "buckets", fault),
            "dirty": subject.look("dirty"),
            "generate": subject.refused(subject.entries["generate"]),
            "num_unfinished": subject.num_unfinished,
            "healed": subject.update("update", family, 1, "buckets"),
            "same": subject.state() == states[1],
        }
    subject.update("update", family, 2, "buckets", "nan 1")
    subject.refit(make_policy(family, 1))
    found["healed by a refit"] = subject.state() == states[1]
    same, other = Refitter(engine).verify(make_policy(family, 1)), Refitter(engine).verify(make_policy(family, 2))
    found["verified"] = {
        "same": same.is_equal,
        "num_other": len(other.differing),
        "num_tensors": same.num_tensors,
        "untouched": subject.state() == states[1],
    }
    return found
