"""Engines given checkpoints that hold a draft: some have one, others do not. `test_drafts.py` says what must come of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engines import booted, booted_dummy, generate, live_bytes, make_policy, refused, scribble
from subject import booted_as
from torch import Tensor

import fp8refit
from fp8refit import Refitter
from fp8refit.checkpoint import quantize_checkpoint
from tests.engines.drafts import WRONG, try_drafting
from tests.tiny_models import drafting


def run_drafts(cases: list, work: str) -> dict:
    """Each family's engine, moved to policy 2 with a draft in every way, over rubbish each time."""
    return {family: refit_with_draft(family, kernel, Path(work)) for family, kernel in cases}


def refit_with_draft(family: str, kernel: str, work: Path) -> dict:
    policy, folder = make_policy(family, 2), work / f"{family}-bf16"
    drafts = drafting(family, policy)
    with booted_dummy(folder, kernel) as llm:
        refitter = Refitter(llm, bucket_bytes=1 << 20)
        refitter.refit(policy)
        found: dict[str, Any] = {"live": live_bytes(llm), "generated": generate(llm), "drafts": sorted(drafts)}
        found["ways"] = {}
        for way, run in ways(llm, refitter, policy, drafts, folder).items():
            scribble(llm)
            ignored = run()
            found["ways"][way] = {"ignored": sorted(ignored), "live": live_bytes(llm), "dirty": refitter.is_dirty}
        found["verified"] = refitter.verify(drafts | policy).is_equal
        found["wrong"] = {
            name: refused(refitter.refit, {**policy, name: torch.zeros(256, 256, dtype=torch.bfloat16)})
            for name in WRONG
        }
        found["dirty"] = refitter.is_dirty
        quantize_checkpoint(folder, work / f"{family}-{kernel}", like=refitter.layout())
        return found


def ways(
    llm: Any, refitter: Refitter, policy: dict[str, Tensor], drafts: dict[str, Tensor], folder: Path
) -> dict[str, Callable[[], Any]]:
    """Each gives the names that its report calls ignored."""
    names = list(policy)
    middle = {name: policy[name] for name in names[: len(names) // 2]} | drafts | policy

    def update() -> Any:
        with fp8refit.update(llm, timeout_s=60.0) as update:
            update.load(drafts)
            update.load(policy)
        return update.report.ignored

    return {
        "mapping": lambda: refitter.refit(drafts | policy).ignored,
        "folder": lambda: refitter.refit(folder).ignored,
        "stream, first": lambda: refitter.refit(iter((drafts | policy).items())).ignored,
        "stream, middle": lambda: refitter.refit(iter(middle.items())).ignored,
        "stream, last": lambda: refitter.refit(iter((policy | drafts).items())).ignored,
        "update": update,
    }


def run_fresh_drafts(cases: list, work: str) -> dict:
    """Engines that load the block-FP8 checkpoints with drafts. No fp8refit in them."""
    found = {}
    for family, kernel in cases:
        with booted(Path(work) / f"{family}-{kernel}", kernel) as llm:
            found[family] = {"generated": generate(llm), "live": live_bytes(llm)}
    return found


def options_of(method: str, work: Path, seed: int) -> dict[str, Any]:
    own = {"model": str(work / f"draft-{seed}")} if method != "mtp" else {}
    speculative = {"method": method, "num_speculative_tokens": 2, **own}
    return {"quantization": "fp8_per_block", "speculative_config": speculative}


def run_drafting(method: str, layout: str, work: str) -> dict:
    """`try_drafting` an engine of policy 1 with its draft."""
    folder = Path(work)
    with booted_as(layout, folder / "policy-1", "fp32", **options_of(method, folder, 1)) as subject:
        return try_drafting(subject, method, folder)


def run_fresh_drafting(method: str, layout: str, work: str) -> dict:
    """An engine that boots with policy 2 and its draft. No fp8refit in it."""
    folder = Path(work)
    with booted_as(layout, folder / "policy-2", "fp32", **options_of(method, folder, 2)) as subject:
        return subject.state()
