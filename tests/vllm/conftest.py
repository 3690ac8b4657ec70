"""Real vLLM 0.32 on the CPU. Every scenario runs in a process of its own, `run_engine.py`.

What is real: vLLM's engine core, scheduler, loaders, post-processing, attention, sampling and prefix cache. What is not:
the block-FP8 product, which is torch's (`cpu_kernel.py`). Nothing here speaks for GPU kernels, for the product of DeepGEMM,
CUTLASS or Marlin, for CUDA graphs, for sleep mode, which vLLM ignores on a CPU, or for speed.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """Run Python in a process that can import vLLM, the tests' kernel and the tests' models; give its standard output."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    log = tmp_path_factory.mktemp("logs") / "stderr.log"
    # Not this folder's parent: `import vllm` would still find the real one, but only because this one is no package.
    paths = [str(HERE.parents[1]), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]

    def run(*arguments, **environment):
        with open(log, "w") as errors:
            result = subprocess.run(
                [sys.executable, *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | ENVIRONMENT | environment | {"PYTHONPATH": os.pathsep.join(paths)},
            )
        if result.returncode:
            pytest.fail(f"{arguments}\n{result.stdout[-2000:]}\n{log.read_text()[-6000:]}", pytrace=False)
        return result.stdout

    return run


@pytest.fixture(scope="session")
def run_engine(python, tmp_path_factory):
    """Run one scenario of `run_engine.py` in its own process and give what it found."""
    folder = tmp_path_factory.mktemp("scenarios")

    def run(name, *, environment=None, **arguments):
        scenario, result = folder / f"{name}.json", folder / f"{name}-result.json"
        scenario.write_text(json.dumps({"name": name, "arguments": arguments}, default=str))
        python(HERE / "run_engine.py", scenario, result, **(environment or {}))
        return json.loads(result.read_text())

    return run
