"""Engines of mixtures of experts, split over ranks: booted from a checkpoint, and refitted to the same policy from noise."""

from pathlib import Path
from typing import Any

from engines import NOISE, bf16_of, booted, generate, look, make_policy, state
from expected import expected_experts
from fresh import fp8_of
from safetensors.torch import load_file

from fp8refit import Refitter


def run_experts(family: str, num_ranks: int, ep_size: int, work: Path) -> dict:
    """What both hold and say at policy 2, and what each kind of source leaves."""
    with booted(fp8_of(family, num_ranks, work), num_ranks, ep_size=ep_size) as engine:
        outputs = generate(engine)  # before it is looked at: 0.5.12 copies a router at its first forward
        found: dict[str, Any] = {"fresh": {"live": look(engine, "live_bytes"), "outputs": outputs}}
    with booted(bf16_of(family, 1, work), num_ranks, ep_size=ep_size, **NOISE) as engine:
        # Said once: copies that a first forward makes have to follow the policy too.
        found["noise"], before = state(engine), look(engine, "places")
        Refitter(engine).refit(make_policy(family, 2))
        found["refitted"] = {"live": look(engine, "live_bytes"), "outputs": generate(engine)}
        found["sources"] = {}
        for kind, source in sources(family, num_ranks, work).items():
            look(engine, "scribble")
            Refitter(engine, bucket_bytes=1 << 20).refit(source)
            found["sources"][kind] = look(engine, "live_bytes")
        after = look(engine, "places")
    found["moved"] = [[n for n in one if one[n] != two.get(n)] for one, two in zip(before, after, strict=True)]
    names = [list(live) for live in found["fresh"]["live"]]
    found["expected"] = expected_experts(make_policy(family, 2), names, ep_size)
    return found


def sources(family: str, num_ranks: int, work: Path) -> dict[str, Any]:
    """Policy 2 with experts stacked, as in a state dict of transformers 5, and apart, as in its checkpoints."""
    stacked = make_policy(family, 2)
    apart = load_file(bf16_of(family, 2, work) / "model.safetensors")
    return {
        "stacked": stacked,
        "stacked, one-shot": iter(stacked.items()),
        "apart": apart,
        "apart, one-shot": iter(apart.items()),
        "block-FP8 safetensors": fp8_of(family, num_ranks, work),
    }
