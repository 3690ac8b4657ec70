"""Engines with latent attention: what each rank holds through refits, and what fresh engines hold."""

from pathlib import Path

from engines import booted, booted_noise, generate, state
from fresh import fp8_of
from refits import try_policies

from fp8refit import Refitter


def run_latent(family: str, num_ranks: int, work: Path) -> dict:
    """One engine from noise through policies, and one that loads policy 2."""
    with booted_noise(family, work, num_ranks) as engine:
        generate(engine)  # SGLang's first forward gives `kv_b_proj` a second name
        found = {"policies": try_policies(engine, family), "layout": Refitter(engine).layout().model_dump(mode="json")}
    with booted(fp8_of(family, num_ranks, work), num_ranks) as engine:
        generate(engine)
        return found | {"fresh": state(engine)}
