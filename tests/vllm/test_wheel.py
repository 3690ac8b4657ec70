"""The wheel in a clean environment beside vLLM: its plugin is found in the engine's own processes, by the wheel's entry point.

What is real and what is not: `conftest.py`. There is no way to the source tree: only the tests come from it.
"""

import json

import pytest

from tests.clean_install import CleanInstall, build, without_source
from tests.tiny_models import save_model
from tests.vllm.processes import ENVIRONMENT

pytestmark = pytest.mark.vllm

SCRIPT = """
import json, sys
from pathlib import Path
import cpu_kernel, fp8refit, fp8refit_vllm
from engines import make_policy
from subject import NOISE, booted_as

if __name__ == "__main__":
    with booted_as("multi-process", Path(sys.argv[1]), "fp32", **NOISE) as subject:
        report = subject.refit(make_policy("qwen3", 1))
        files = [fp8refit.__file__, fp8refit_vllm.__file__]
        found = {"version": report.version, "num_bytes": report.bytes_written, "files": files}
    Path(sys.argv[2]).write_text(json.dumps(found))
"""


def test_an_engine_in_another_process_is_refitted_by_what_the_wheel_installs(environment, tmp_path):
    installed = CleanInstall.of(build("wheel", tmp_path / "wheel"), tmp_path / "clean")
    apart = {"PYTHONPATH": without_source(environment["PYTHONPATH"], tmp_path / "source")}
    apart["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # the worker in another process
    save_model("qwen3", 1, tmp_path / "model")
    script, out = tmp_path / "script.py", tmp_path / "found.json"
    script.write_text(SCRIPT)
    installed.run("python", script, tmp_path / "model", out, environment=ENVIRONMENT | apart, timeout_s=240)
    found = json.loads(out.read_text())
    assert found["version"] == 1 and found["num_bytes"] > 0
    assert all(file.startswith(str(installed.site_packages)) for file in found["files"])
