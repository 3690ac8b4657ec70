"""Real engines whose experts move between ranks (EPLB): refitted, moved, and refitted again over every route."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import make_policy
from subject import NOISE, Subject, booted_as

from fp8refit import Broadcaster, Refitter
from tests.engines.containers import CONFIGS

FAMILY = "qwen3_moe"
LAYOUT = "core in process"
EPLB = {
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 2, "use_async": False, "communicator": "torch_gloo"},
}
"""Six places for four experts, three on each rank."""
PLACES = {
    "mapped": [[0, 1, 1, 2, 3, 3], [3, 2, 1, 0, 0, 2]],
    "mapped again": [[2, 0, 1, 1, 3, 2], [3, 2, 1, 0, 0, 2]],
    "stream": [[1, 1, 1, 0, 2, 3], [0, 1, 2, 3, 0, 0]],
    "files": [[3, 2, 1, 0, 3, 2], [2, 2, 3, 3, 1, 0]],
    "broadcast": [[0, 1, 2, 3, 1, 1], [3, 0, 3, 1, 2, 3]],
    "broadcast again": [[1, 3, 2, 0, 0, 1], [1, 0, 3, 1, 2, 2]],
}
"""By layer, for each route. They put other experts onto each rank."""


def pushes(subject: Subject, policy: dict, files: Path) -> dict[str, Callable[[], Any]]:
    broadcaster, refitter = Broadcaster([subject.llm], timeout_s=30.0), Refitter(subject.llm)
    refitter.refit(policy)
    return {
        "mapped": lambda: refitter.refit(policy),
        "mapped again": lambda: refitter.refit(policy),
        "stream": lambda: subject.refit(iter(policy.items())),
        "files": lambda: subject.refit(files),
        "broadcast": lambda: broadcaster.push(policy),
        "broadcast again": lambda: broadcaster.push(policy),
    }


def held(subject: Subject) -> dict:
    assert subject.engine.reset_prefix_cache()  # so that batches are alike, to the last bit of what is said
    return {
        "places": subject.look("experts_at")[0],
        "rows": subject.look("row_digests"),
        "live": subject.live(),
        "outputs": subject.generate(),
        "fingerprints": Refitter(subject.llm).fingerprints(),
    }


def run_moved_experts(model: str, kernel: str) -> dict:
    """An engine of noise, refitted where its experts are at first, and again over each route after they have moved."""
    with booted_as(LAYOUT, Path(model), kernel, **EPLB, **NOISE) as subject:
        policy = make_policy(FAMILY, 2)
        subject.refit(make_policy(FAMILY, 1))
        subject.refit(policy)
        found: dict[str, Any] = {"at first": held(subject)}
        for kind, push in pushes(subject, policy, Path(model)).items():
            subject.look("move_experts", PLACES[kind])
            verified = subject.verify(policy).is_equal
            subject.look("scribble")
            push()
            found[kind] = held(subject) | {"verified": [verified, subject.verify(policy).is_equal]}
        return found | {"faults": try_faults(subject, policy), "background": refit_while_moving(subject)}


def try_faults(subject: Subject, policy: dict) -> dict:
    lacking = {name: tensor for name, tensor in policy.items() if name != "model.layers.1.mlp.experts.down_proj"}
    before = subject.live()
    found = {"lacking": subject.refused(subject.refit, lacking), "untouched": subject.live() == before}
    reset = subject.engine.reset_prefix_cache

    def move_and_reset(*arguments: Any) -> bool:
        del subject.engine.reset_prefix_cache
        subject.look("move_experts", PLACES["mapped"])
        return reset(*arguments)

    subject.engine.reset_prefix_cache = move_and_reset
    found["moved"] = subject.refused(subject.refit, iter(make_policy(FAMILY, 1).items()))
    found |= {"dirty": subject.is_dirty, "kept": subject.verify(policy).is_equal}
    subject.refit(make_policy(FAMILY, 1))
    return found | {"refitted": subject.verify(make_policy(FAMILY, 1)).is_equal}


def refit_while_moving(subject: Subject) -> dict:
    """Rows of policy 1 are copied apart in the background, and policy 2 is written before a step takes them."""
    found = {"is_begun": subject.look("move_in_background", PLACES["files"])}
    subject.refit(make_policy(FAMILY, 2))
    found |= {"moving": subject.look("is_moving"), "live": subject.live()}
    subject.generate()  # in which a step would take them
    return found | {"live_after_steps": subject.live(), "places": subject.look("experts_at")[0]}


def run_moved_formats(cases: list, work: str) -> dict:
    """Engines in other formats, refitted before vLLM moves their experts, and again over rubbish."""
    found = {}
    for family, container in cases:
        container, _, kernel = container.partition(" in ")
        options = NOISE | {"hf_overrides": {"quantization_config": CONFIGS[container]}} if container in CONFIGS else {}
        options = options or {"quantization": container}
        with booted_as(LAYOUT, Path(work) / family, kernel or "fp32", **EPLB, **options) as subject:
            policy = make_policy(family, 2)
            subject.refit(policy)
            at_first = subject.look("experts_at")[0]
            subject.look("move_experts", [places[::-1] for places in at_first])
            moved, verified = subject.live(), subject.verify(policy).is_equal
            subject.look("scribble")
            subject.refit(policy)
            found[container] = {"moved": moved, "live": subject.live(), "verified": verified}
            found[container]["formats"] = sorted(
                {str(s.format) for s in subject.layout().slots if s.format is not None and ".experts." in s.name}
            )
    return found


def run_fresh_moved_experts(model: str, kernel: str) -> dict:
    """An engine of a checkpoint of policy 2, whose experts vLLM moves to the same places."""
    with booted_as(LAYOUT, Path(model), kernel, **EPLB) as subject:
        found = {"at first": held(subject)}
        for kind, places in PLACES.items():
            subject.look("move_experts", places)
            found[kind] = held(subject)
        return found
