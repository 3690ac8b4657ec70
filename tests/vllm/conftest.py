"""Real vLLM 0.32 on the CPU. Every scenario (`run_engine.py`) runs in a process of its own, or in one a rank.

What is real: vLLM's engine core, scheduler, loaders, post-processing, attention, sampling, prefix cache, worker processes
and their collective operations. What is not: the block-FP8 product, which is torch's (`cpu_kernel.py`), and so is attention
over an FP8 KV cache where the CPU has no AVX-512 (`cpu_fp8_cache.py`). torchvision is a stub (`stubs/`): no test processes an
image. Worker processes are forks of one that has imported vLLM, as by its default on a GPU; `layout_runs.CASES` says which are
spawned. Nothing here speaks for GPU kernels, for the product of DeepGEMM, CUTLASS or Marlin, for CUDA graphs, for CUDA IPC, for
sleep mode, which vLLM ignores on a CPU, or for speed.
"""

import importlib.util
import os

import pytest

from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.live.layout import EngineLayout
from tests.tiny_models import save_model
from tests.vllm.layout_runs import LayoutRuns
from tests.vllm.processes import HERE, Starter, run_python, run_scenario

pytest.register_assert_rewrite("tests.engines.adapter_tests", "tests.engines.precision", "tests.engines.update_tests")

PLUGIN = "fp8refit_cpu_kernel"
"""Name of the tests' own plugin for vLLM, `cpu_plugin.py`."""
TIMEOUT_S = 280
"""For a scenario of many engines in one process."""


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """What makes vLLM, in every process, find the tests' models, kernel and plugin."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    plugins = tmp_path_factory.mktemp("plugins")
    folder = plugins / f"{PLUGIN}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1.0\n")
    entry_points = {"vllm.general_plugins": "cpu_plugin:register", "vllm.platform_plugins": "ray_platform:name"}
    groups = [f"[{group}]\n{PLUGIN} = {found}\n" for group, found in entry_points.items()]
    (folder / "entry_points.txt").write_text("".join(groups))
    # Not this folder's parent: `import vllm` would still find the real one, but only because this one is no package.
    paths = [
        HERE / "stubs",
        HERE.parent / "stubs",
        HERE.parents[1],
        HERE,
        plugins,
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {"PYTHONPATH": os.pathsep.join(map(str, paths))}


@pytest.fixture(scope="session")
def named(environment, tmp_path_factory):
    """The environment, in which trainers find a version of vLLM: the CPU's goes by another name."""
    import vllm

    folder = tmp_path_factory.mktemp("named")
    (folder / "vllm.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}+cpu\n"
    (folder / "vllm.dist-info" / "METADATA").write_text(metadata)
    return environment | {"PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], str(folder)])}


@pytest.fixture(scope="session")
def python(environment, tmp_path_factory):
    """Run Python in a process that can import vLLM, the tests' kernel and the tests' models; give its standard output."""
    folder = tmp_path_factory.mktemp("logs")

    def run(*arguments):
        return run_python(arguments, environment, folder, timeout_s=TIMEOUT_S)

    return run


@pytest.fixture(scope="session")
def starter(environment, tmp_path_factory):
    """Of every scenario's processes."""
    starter = Starter(["vllm.v1.worker.cpu_worker"], environment, tmp_path_factory.mktemp("starter"))
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def run_engine(starter, tmp_path_factory):
    """Run one scenario of `run_engine.py` in its own process and give what it found."""
    folder = tmp_path_factory.mktemp("scenarios")

    def run(name, *, within_s=TIMEOUT_S, **arguments):
        (found,) = run_scenario(starter, name, arguments, folder, timeout_s=within_s).drivers
        return found

    return run


@pytest.fixture(scope="session")
def refit_and_boot(run_engine, tmp_path_factory):
    """Run dummy engines of families and kernels through refits to policy 2, and others that load it from block-FP8 checkpoints.

    Gives what both found, by names such as `qwen3-fp32`. The others run in a process into which fp8refit's fill never comes.
    """

    def run(cases):
        work = tmp_path_factory.mktemp("refit")
        for family in {family for family, _ in cases}:
            save_model(family, 2, work / f"{family}-bf16")
        refitted = run_engine("refit", cases=cases, work=work)
        for family, kernel in cases:
            layout = EngineLayout.model_validate(refitted[f"{family}-{kernel}"]["layout"])
            quantize_checkpoint(work / f"{family}-bf16", work / f"{family}-{kernel}", like=layout)
        return refitted, run_engine("fresh", cases=cases, work=work)

    return run


@pytest.fixture(scope="session")
def run_ranks(starter, tmp_path_factory):
    """Run one scenario of two ranks, each in a process of its own beside the driver's, and give what the driver found."""

    def run(name, family):
        folder = tmp_path_factory.mktemp("ranks")
        save_model(family, 2, folder / f"{family}-bf16")
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        outcome = run_scenario(starter, name, {"work": folder}, folder, timeout_s=100, environment=environment)
        assert outcome.left == []
        return outcome.drivers[0]

    return run


@pytest.fixture(scope="session")
def layout_runs(starter, tmp_path_factory):
    """What engines of every process layout found; each is run when it is first asked for."""
    return LayoutRuns(starter, tmp_path_factory.mktemp("layouts"))
