"""Kernels that are compiled for a GPU without one, and where they are launched."""

import ast
import json
import mmap
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8refit.bench.code import changed_since
from tests.kernels.run_compiling import DTYPES, PARTS, compile_all

SHAPES = ((256, 128), (256, 8), (8, 128))
COMPILED = Path(__file__).parents[2] / "benchmarks" / "results" / "compiled.json"


@pytest.mark.timeout(600)
def test_every_kernel_compiles_for_hopper(tmp_path):
    """From BF16; other dtypes and other Tritons are compiled by `nox -s kernels`."""
    assert compile_all(("bfloat16",), tmp_path)


def test_every_kernel_was_compiled_for_every_dtype_by_every_triton_since_it_changed():
    found = json.loads(COMPILED.read_text())["tritons"]
    (tritons,) = re.findall(r"^TRITONS = (\(.*\))$", (COMPILED.parents[2] / "noxfile.py").read_text(), re.MULTILINE)
    assert set(found) == set(ast.literal_eval(tritons))
    for version, compiled in found.items():
        assert set(compiled["dtypes"]) == set(DTYPES), version
        assert changed_since(compiled, PARTS) == "", f"run: nox -s kernels (Triton {version})"


class Recorder:
    """In place of a kernel: notes on which device it would have been launched."""

    def __init__(self, monkeypatch) -> None:
        self.devices: list[object] = []
        self._current: list[object] = [torch.device("cuda", 0)]

        @contextmanager
        def device(wanted):
            self._current.append(wanted)
            yield
            self._current.pop()

        monkeypatch.setattr(torch.cuda, "device", device)

    def __getitem__(self, grid):
        return lambda *_, **__: self.devices.append(self._current[-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_kernels.py launches them there")
def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    """Triton launches on the current device, which a model on another GPU has no part in."""
    from fp8refit.kernels import triton_amax, triton_groups, triton_merge
    from fp8refit.live.formats import ScaleFormat

    recorder = Recorder(monkeypatch)
    for module, kernel in (
        (triton_amax, "_raise_maxima"),
        (triton_merge, "_add_product"),
        (triton_groups, "_quantize_tile"),
    ):
        monkeypatch.setattr(module, kernel, recorder)
    with FakeTensorMode():
        x, up, down = (torch.empty(*shape, dtype=torch.bfloat16, device="cuda:1") for shape in SHAPES)
        bits = torch.zeros(1, dtype=torch.int32, device="cuda:1")
        triton_amax.raise_maxima_triton(bits, 0, [x])
        triton_merge.add_product_triton(x, up, down, 1.0, out=x)
        triton_groups.quantize_groups(x, ScaleFormat.FP32)
    assert recorder.devices == [torch.device("cuda", 1)] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory that is reserved and not taken is the CPU's")
def test_a_tensor_of_more_than_two_to_the_31_elements_is_merged():
    """In columns of 2^25 elements the 65th begins where int32 ends."""
    from fp8refit.kernels.triton_merge import add_product_triton

    reserved = mmap.mmap(-1, 10 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    memory = torch.frombuffer(reserved, dtype=torch.bfloat16)
    weight = memory.as_strided((1, 66), (1, 1 << 25), 1 << 31)
    weight.copy_(torch.arange(66))
    up, down = torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 66, dtype=torch.bfloat16)
    out = torch.empty(1, 66, dtype=torch.bfloat16)
    add_product_triton(weight, up, down, 1.0, out=out)
    assert torch.equal(out, torch.arange(1, 67).bfloat16()[None])
