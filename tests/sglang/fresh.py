"""Engines that load block-FP8 checkpoints, and what they hold and say before fp8refit does anything to them."""

from pathlib import Path

import sglang
from calibrations import calibrate
from engines import bf16_of, booted, generate, look, make_policy, num_unfinished, state
from expected import expected_bytes

from fp8refit import Refitter
from fp8refit.checkpoint import quantize_checkpoint


def run_fresh(cases: list, refitted: list[str], work: Path) -> dict:
    """For each family and number of ranks, what an engine of policy 2 holds and says.

    Args:
        cases: Families and numbers of ranks.
        refitted: Families of more engines, of one rank, which are refitted to policy 1 after that.
        work: Folder for checkpoints.
    """
    found = {}
    for family, num_ranks in [*cases, *((family, 1) for family in refitted)]:
        with booted(fp8_of(family, num_ranks, work), num_ranks) as engine:
            found[f"{family}-{num_ranks}"] = one = look_at(engine)
            if num_ranks == 1:
                one["wrong"] = wrong_tensors(engine, family, 2, one)
            if family in refitted:
                one["is_first"] = [rank.is_first for rank in Refitter(engine).refit(make_policy(family, 1)).ranks]
                one["wrong_after_refit"] = wrong_tensors(engine, family, 1, one)
                one["calibration"] = calibrate(engine, family)
    return found


def fp8_of(family: str, num_ranks: int, work: Path) -> Path:
    """The folder of policy 2 as `fp8refit quantize` writes it, made when it is first asked for."""
    checkpoint = work / f"{family}-{num_ranks}-fp8-2"
    if not checkpoint.exists():
        quantize_checkpoint(bf16_of(family, 2, work), checkpoint)
    return checkpoint


def look_at(engine: sglang.Engine) -> dict:
    """What it holds and says, three times over."""
    found = state(engine) | {"again": generate(engine), "num_unfinished": num_unfinished(engine), "cold": state(engine)}
    return found | {"places": look(engine, "places"), "linears": look(engine, "linears")}


def wrong_tensors(engine: sglang.Engine, family: str, seed: int, booted: dict) -> list[str]:
    """Live tensors of an engine of one rank that are not what the public quantizer makes of policy `seed`."""
    (live,), (places,) = look(engine, "live_bytes"), booted["places"]
    shapes = {name: place[2] for name, place in places.items()}
    expected = expected_bytes(make_policy(family, seed), shapes, booted["live"][0])
    return [name for name in live if live[name] != expected[name]]
