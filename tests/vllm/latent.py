"""Engines with latent attention: what each rank holds through refits, and what fresh engines hold."""

from pathlib import Path

from subject import NOISE, booted_as

from tests.engines.attempts import try_policies


def run_latent(layout: str, family: str, kernel: str, work: str) -> dict:
    """One engine from noise through policies."""
    with booted_as(layout, Path(work) / f"{family}-bf16", kernel, **NOISE) as subject:
        return {"policies": try_policies(subject, family), "layout": subject.layout().model_dump(mode="json")}


def run_fresh_latent(layout: str, family: str, kernel: str, work: str) -> dict:
    """One engine that loads the block-FP8 checkpoint of policy 2."""
    with booted_as(layout, Path(work) / f"{family}-{kernel}", kernel) as subject:
        return subject.state()
