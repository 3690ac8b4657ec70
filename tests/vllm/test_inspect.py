"""`fp8refit inspect --engine vllm` on a real vLLM engine, on the CPU. Stock vLLM has no block-FP8 kernel there: the tests' is
registered before the command line starts."""

import json

import pytest

from fp8refit.live.layout import EngineLayout
from tests.tiny_models import save_model

pytestmark = pytest.mark.vllm

COMMAND_LINE = """
import cpu_kernel, torch
from fp8refit.cli import app
torch.compiler.set_stance("force_eager")
cpu_kernel.register("ue8m0")
app()
"""


def test_standard_output_is_the_layout_as_json_and_nothing_else(python, tmp_path):
    save_model("qwen3", 1, tmp_path / "model")
    output = python("-c", COMMAND_LINE, "inspect", tmp_path / "model", "--engine", "vllm", "--json")
    layout = EngineLayout.model_validate(json.loads(output))
    assert (layout.engine, layout.device, layout.refusals) == ("vllm", "cpu", ())
    assert layout.versions.keys() == {"vllm", "torch"}
    formats = {slot.scale_format for slot in layout.slots if "_proj" in slot.name}
    assert formats == {"ue8m0"}
    assert {slot.scale_format for slot in layout.slots if "_proj" not in slot.name} == {None}
