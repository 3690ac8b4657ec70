"""Real SGLang on the CPU, kernels stubbed. Every scenario runs in a process of its own, `run_engine.py`.

What is real: SGLang's engine, tokenizer manager, scheduler processes, loaders, post-processing, torch-native attention,
sampling, radix cache, tensor parallelism over gloo. What is not: the block-FP8 product, which is torch's (`cpu_linear.py`),
the kernels that draft tokens and check them (`cpu_drafts.py`), and `sgl_kernel` and `cutlass`, stubs of which nothing else
runs (`stubs/`; `tests/stubs` lets torchvision be imported). Scheduler processes are forks of one that has imported SGLang, but
for those that `run_engine.SPAWNED` names, which begin as SGLang has it. Nothing here speaks for GPU kernels, for DeepGEMM,
CUTLASS or FlashInfer and the layouts that they pack weights into, for CUDA graphs, for CUDA IPC, for the memory saver, for an
FP8 KV cache, or for speed. SGLang and torchvision are installed without their dependencies, on a CPU build of a torch that
SGLang does not pin: `requirements-*.txt` are what they need here.
"""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.vllm.processes import ProcessFailure, Starter, run_scenario

HERE = Path(__file__).parent

pytest.register_assert_rewrite("tests.engines.adapter_tests", "tests.engines.precision", "tests.engines.update_tests")

PLUGIN = "fp8refit_cpu_kernel"
"""Name of the tests' own plugin for SGLang, `cpu_plugin.py`."""


TIMEOUT_S = 280
"""For one scenario; booting an engine takes ten seconds of it."""
FRESH = [("qwen3", 1), ("qwen2_wide", 2)]
"""Family and number of ranks of the engines that load a checkpoint, and of those that are refitted to the same policy."""
REFITTED = ["mistral", "phi3", "glm4"]
"""Families of engines that load a checkpoint and are then refitted themselves."""


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """What makes SGLang, in every process, run on a CPU and find the tests' stubs, plugin and models."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang")
    plugins = tmp_path_factory.mktemp("plugins")
    folder = plugins / f"{PLUGIN}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{PLUGIN} = cpu_plugin:register\n")
    # Not this folder's parent: `import sglang` would still find the real one, but only because this one is no package.
    paths = [
        HERE / "stubs",
        HERE.parent / "stubs",
        HERE,
        HERE.parents[1],
        plugins,
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {"PYTHONPATH": os.pathsep.join(map(str, paths)), "SGLANG_USE_CPU_ENGINE": "1"}


@pytest.fixture(scope="session")
def starter(environment, tmp_path_factory):
    """Of every scenario's processes."""
    modules = ["sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler", "sglang.srt.models.registry"]
    starter = Starter(modules, environment, tmp_path_factory.mktemp("starter"))
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def run_engine(starter, tmp_path_factory):
    """Run one scenario of `run_engine.py` in its own process and give what it found."""
    folder = tmp_path_factory.mktemp("scenarios")

    def run(name, *, within_s=TIMEOUT_S, **arguments):
        outcome = run_scenario(starter, name, arguments | {"work": folder}, folder, timeout_s=within_s)
        if outcome.left:
            raise ProcessFailure(f"{name}: its engines outlived it: {outcome.left}")
        (found,) = outcome.drivers
        return found

    return run


@pytest.fixture(scope="session")
def fresh(run_engine):
    """What engines say and check that loaded a block-FP8 checkpoint."""
    return run_engine("fresh", cases=FRESH, refitted=REFITTED)


@dataclass(frozen=True, kw_only=True)
class Refits:
    """What one engine found that was refitted from noise."""

    family: str
    num_ranks: int
    found: dict

    @property
    def name(self) -> str:
        return f"{self.family}-{self.num_ranks}"


@pytest.fixture(scope="session", params=FRESH, ids=[f"{family}-{num_ranks}" for family, num_ranks in FRESH])
def refits(request, run_engine):
    """What engines say and hold through refits, good and bad."""
    family, num_ranks = request.param
    found = run_engine("refits", family=family, num_ranks=num_ranks)
    return Refits(family=family, num_ranks=num_ranks, found=found)
