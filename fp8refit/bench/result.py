"""What every result of a benchmark says of itself: the command, the machine, the versions, and the code that was measured."""

import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from fp8refit import __version__
from fp8refit.bench.code import PARTS, age_of, current_commit, hash_parts


class BenchResult(BaseModel, frozen=True):
    """A result, and what has to be known to repeat it and to tell whether it is out of date."""

    command: str
    """Repeats the measurement."""
    gpu: str
    versions: dict[str, str]
    commit: str | None = None
    """The commit that was measured, with `+` if files had changed; None if the code was in no checkout."""
    recorded_in: str | None = None
    """Of a result without `commit`: the commit in which its figures first were. What was measured is no newer."""
    code: dict[str, str | None] = {}
    """Hashes of the packages that were measured, see `fp8refit.bench.code`; None if the commit has no such package."""

    @property
    def age(self) -> str:
        """What has changed since it was measured, see `age_of`."""
        return age_of(self.model_dump(include={"commit", "recorded_in", "code"}))


class Findings(BenchResult, frozen=True, extra="allow"):
    """A result with figures of its own, which no other scenario has."""


def stamp(parts: Iterable[str] = PARTS) -> dict[str, Any]:
    """Return `commit` and `code` of a result that is being measured.

    Args:
        parts: The packages that it runs through.
    """
    return {"commit": current_commit(), "code": hash_parts(parts)}


def gpu_name(device: torch.device | None = None) -> str:
    """Return the name of a GPU, or of the processor if there is none or `device` is the CPU."""
    has_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return torch.cuda.get_device_name(device) if has_gpu else platform.processor() or "CPU"


def versions_of(*packages: str) -> dict[str, str]:
    """Return the versions of fp8refit, torch, CUDA, and those of `packages` that are installed."""
    installed = {name: metadata.version(name) for name in packages if any(metadata.distributions(name=name))}
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {"fp8refit": __version__, "torch": torch.__version__, **cuda, **installed}


def write_result(result: BenchResult, file: Path) -> None:
    """Write a result as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(result.model_dump_json(indent=1) + "\n")
