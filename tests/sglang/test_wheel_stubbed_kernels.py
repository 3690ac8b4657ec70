"""The wheel in a clean environment beside SGLang: its plugin is found in the scheduler's process, by the wheel's entry point.

What is real and what is not: `conftest.py`. There is no way to the source tree: only the tests come from it.
"""

import json

import pytest

from tests.clean_install import CleanInstall, build, without_source
from tests.vllm.processes import ENVIRONMENT

pytestmark = pytest.mark.sglang

SCRIPT = """
import json, sys
from pathlib import Path
import fp8refit, fp8refit_sglang
from engines import booted_noise, make_policy

if __name__ == "__main__":
    with booted_noise("qwen3", Path(sys.argv[1])) as engine:
        report = fp8refit.Refitter(engine).refit(make_policy("qwen3", 1))
        files = [fp8refit.__file__, fp8refit_sglang.__file__]
        found = {"version": report.version, "num_bytes": report.bytes_written, "files": files}
    Path(sys.argv[2]).write_text(json.dumps(found))
"""


def test_an_engine_in_another_process_is_refitted_by_what_the_wheel_installs(environment, tmp_path):
    installed = CleanInstall.of(build("wheel", tmp_path / "wheel"), tmp_path / "clean")
    apart = {"PYTHONPATH": without_source(environment["PYTHONPATH"], tmp_path / "source")}
    script, out = tmp_path / "script.py", tmp_path / "found.json"
    script.write_text(SCRIPT)
    installed.run("python", script, tmp_path, out, environment=ENVIRONMENT | environment | apart, timeout_s=240)
    found = json.loads(out.read_text())
    assert found["version"] == 1 and found["num_bytes"] > 0
    assert all(file.startswith(str(installed.site_packages)) for file in found["files"])
