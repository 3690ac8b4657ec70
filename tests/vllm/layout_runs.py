"""Which engine is run in each process layout, and what came of it. Every engine is booted once for all tests."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.live.layout import EngineLayout
from tests.tiny_models import save_model
from tests.vllm.processes import Outcome, ProcessFailure, Starter, run_scenario

TIMEOUT_S = 110
"""For one engine; booting takes most of it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The engine that stands for one layout.

    `lived` is the engine that is refitted, `fresh` the one that loads a checkpoint. Each ends in its own way.
    """

    family: str
    kernel: str
    ending: str
    fresh_ending: str
    num_drivers: int = 1
    is_core_in_process: bool = False
    start_method: str = "fork"
    fresh_environment: tuple[tuple[str, str], ...] = ()
    fresh_options: tuple[tuple[str, Any], ...] = ()


NO_PLUGIN = (("VLLM_PLUGINS", "fp8refit_cpu_kernel"),)
"""The tests' plugin is loaded, fp8refit's is not."""

ASYNCHRONOUS = Case(
    family="qwen3",
    kernel="ue8m0",
    ending="worker killed while idle",
    fresh_ending="refitted again",
    fresh_environment=NO_PLUGIN,
    fresh_options=(("worker_extension_cls", "fp8refit_vllm.worker.WorkerExtension"),),
)

CASES = {
    "multi-process": Case(
        family="qwen3_large",
        kernel="fp32",
        ending="worker killed while idle",
        fresh_ending="refused",
        fresh_environment=NO_PLUGIN,
        start_method="spawn",
    ),
    "tensor parallel": Case(
        family="qwen2_wide",
        kernel="ue8m0",
        ending="worker killed while it writes",
        fresh_ending="driver killed",
    ),
    "core in process": Case(
        family="glm4",
        kernel="fp32",
        ending="another method raises",
        fresh_ending="worker killed while idle",
        is_core_in_process=True,
    ),
    "external launcher": Case(
        family="phi3",
        kernel="fp32",
        ending="first rank killed",
        fresh_ending="last rank gone",
        num_drivers=2,
        is_core_in_process=True,
    ),
    "asynchronous": ASYNCHRONOUS,
    "replicas": replace(ASYNCHRONOUS, ending="worker killed while it writes"),
}
KILLED_DRIVER = {"driver killed": (0,), "first rank killed": (0,), "last rank gone": (1,)}


class LayoutRuns:
    """Runs engines when they are asked for, and remembers failures too.

    Args:
        starter: Of their processes.
        folder: For models, checkpoints and results.
    """

    def __init__(self, starter: Starter, folder: Path) -> None:
        self._starter = starter
        self._folder = folder

    def lived(self, layout: str) -> Outcome:
        """The engine of `layout` that was refitted."""
        return _outcome_of(self._live(layout))

    def fresh(self, layout: str) -> Outcome:
        """The engine of `layout` that loaded what the refitted one was refitted to."""
        return _outcome_of(self._load(layout))

    @functools.cache  # noqa: B019 - one object a session
    def _live(self, layout: str) -> Outcome | ProcessFailure:
        case = CASES[layout]
        for seed in (1, 2):
            folder = self._folder / f"{case.family}-bf16-{seed}"
            if not folder.exists():
                save_model(case.family, seed, folder)
        arguments = {"ending": case.ending, "fp8": self._folder / f"{layout}-fp8-1"}
        return self._run("layout", layout, arguments, ending=case.ending, environment={})

    @functools.cache  # noqa: B019 - one object a session
    def _load(self, layout: str) -> Outcome | ProcessFailure:
        case, lived = CASES[layout], self.lived(layout)
        checkpoint = self._folder / f"{layout}-fp8-2"
        described = EngineLayout.merge([EngineLayout.model_validate(driver["layout"]) for driver in lived.drivers])
        quantize_checkpoint(self._folder / f"{case.family}-bf16-2", checkpoint, like=described)
        arguments = {"ending": case.fresh_ending, "checkpoint": checkpoint, "options": dict(case.fresh_options)}
        return self._run(
            "fresh layout", layout, arguments, ending=case.fresh_ending, environment=dict(case.fresh_environment)
        )

    def _run(
        self, scenario: str, layout: str, arguments: dict, *, ending: str, environment: dict[str, str]
    ) -> Outcome | ProcessFailure:
        case = CASES[layout]
        arguments |= {"layout": layout, "family": case.family, "kernel": case.kernel, "work": self._folder}
        environment = environment | {
            "FP8REFIT_TEST_START_METHOD": case.start_method,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not case.is_core_in_process)),
        }
        try:
            return run_scenario(
                self._starter,
                scenario,
                arguments,
                self._folder,
                timeout_s=TIMEOUT_S,
                environment=environment,
                num_drivers=case.num_drivers,
                may_die=KILLED_DRIVER.get(ending, ()),
            )
        except ProcessFailure as failure:
            return failure


def _outcome_of(outcome: Outcome | ProcessFailure) -> Outcome:
    if isinstance(outcome, ProcessFailure):
        raise outcome
    return outcome
