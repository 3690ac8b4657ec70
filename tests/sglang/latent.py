"""Engines with latent attention: what each rank holds through refits, and what fresh engines hold."""

from pathlib import Path
from typing import Any

from engines import booted, booted_noise, generate, state
from fresh import fp8_of
from subject import Subject

from fp8refit import Refitter
from tests.engines.attempts import try_policies
from tests.tiny_models import drafting, make_model


def run_latent(family: str, num_ranks: int, work: Path) -> dict:
    """One engine from noise through policies, and one that loads policy 2."""
    with booted_noise(family, work, num_ranks) as engine:
        generate(engine)  # SGLang's first forward gives `kv_b_proj` a second name
        found = {"policies": try_policies(Subject(engine), family)}
        found["layout"] = Refitter(engine).layout().model_dump(mode="json")
        found["drafts"] = try_drafts(engine, family)
    with booted(fp8_of(family, num_ranks, work), num_ranks) as engine:
        generate(engine)
        return found | {"fresh": state(engine)}


def try_drafts(engine: Any, family: str) -> dict:
    """What comes of a policy with a draft, which this engine does not run: before the policy, and at the end of a stream."""
    policy, refitter = make_model(family, 2).state_dict(), Refitter(engine)
    drafts = drafting(family, policy)
    sources = {"first": drafts | policy, "stream": iter((policy | drafts).items())}
    found: dict[str, Any] = {"names": sorted(drafts), "ignored": {}, "same": {}}
    for way, source in sources.items():
        found["ignored"][way] = sorted(refitter.refit(source).ignored)
        found["same"][way] = refitter.verify(policy).is_equal
    return found
