"""Compiles every Triton kernel for a GPU that is not there, by what compiles or launches it. Prints what each takes.

python compiling.py 90                      # the compute capability
python compiling.py 90 bfloat16,float32     # sources of these dtypes only
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fp8refit.kernels.merge import Product
from fp8refit.kernels.products import LowRank
from fp8refit.kernels.triton_amax import raise_maxima_triton
from fp8refit.kernels.triton_groups import quantize_groups
from fp8refit.kernels.triton_merge import add_product_triton, add_products_triton
from fp8refit.kernels.triton_table import TritonTable
from fp8refit.kernels.work import Action, Task
from fp8refit.live.formats import MXFP8, NVFP4, PER_ROW, PER_TENSOR, BlockFormat, Placement, ScaleFormat
from fp8refit.live.slots import Op


class Absent:
    """What Triton asks of the driver before it launches."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def main() -> None:
    driver.set_active(Absent(int(sys.argv[1])))
    run = JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **kwargs):
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        found = {
            "kernel": kernel.__name__,
            "shared_bytes": compiled.metadata.shared,
            "stack_bytes": stack_bytes(compiled.asm["cubin"]),
            "has_code": "cubin" in compiled.asm,
        }
        print(json.dumps(found), flush=True)
        return {(1, 1, 1): None} if warmup else None

    JITFunction.run = compile_only
    wanted = sys.argv[2].split(",") if sys.argv[2:] else ("bfloat16", "float16", "float32")
    for dtype in (getattr(torch, name) for name in wanted):
        weight = torch.zeros(256, 384, dtype=dtype)
        for rank in (8, 64):
            up, down = torch.zeros(256, rank, dtype=dtype), torch.zeros(rank, 384, dtype=dtype)
            add_product_triton(weight, up, down, 0.5, out=weight)
            product = Product(weight=weight, up=up, down=down, scale=0.5, out=weight)
            add_products_triton([product, replace(product, up=up.float(), down=down.float())])
        quantize_groups(weight, ScaleFormat.FP32)
        quantize_groups(weight, ScaleFormat.UE8M0, is_transposed=True)
        raise_maxima_triton(torch.zeros(3, dtype=torch.int32), 0, [weight, None, weight])
        launch_all([task(Op.QUANTIZE, weight), task(Op.COPY, weight)])
        launch_all([replace(task(Op.QUANTIZE, weight), product=LowRank(up, down, 0.5))])
        if dtype is torch.float16:  # differs from BF16 in nothing but its loads
            continue
        for columns in (100, 4096, 12288, 20000):
            launch_all([rows_task(torch.zeros(4, columns, dtype=dtype))])
        launch_all([rows_task(torch.zeros(4096, 4, dtype=dtype).t())])
        launch_all(shared_tasks(torch.zeros(4, 4096, dtype=dtype)))
        for placement in Placement:
            launch_all([groups_task(torch.zeros(128, 256, dtype=dtype), placement)])
            launch_all(levels_tasks(torch.zeros(128, 256, dtype=dtype), placement))
    for dtype in (torch.bfloat16, torch.float32):
        in_steps = LowRank(torch.zeros(256, 100, dtype=dtype), torch.zeros(100, 384, dtype=dtype), 0.5)
        launch_all([replace(task(Op.QUANTIZE, torch.zeros(256, 384).bfloat16()), product=in_steps)])
    codes, scale = torch.zeros(256, 384).to(torch.float8_e4m3fn), torch.ones(2, 3)
    launch_all([task(Op.COPY_CODES, codes), task(Op.COPY_SCALES, scale)])


def stack_bytes(cubin: bytes) -> int:
    """What a program keeps in memory for want of registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", told)[1])


def launch_all(tasks: list[Task]) -> None:
    is_usual = tasks[0].source.dtype in (torch.bfloat16, torch.float8_e4m3fn)
    for action in Action if is_usual else (Action.WRITE, Action.CHECK):  # what is compared has the target's dtype
        TritonTable(tasks, torch.device("cpu")).compile(check=True, action=action)


def task(op: Op, source: torch.Tensor) -> Task:
    is_fp8 = op in (Op.QUANTIZE, Op.COPY_CODES)
    dtype = torch.float8_e4m3fn if is_fp8 else torch.float32 if op is Op.COPY_SCALES else torch.bfloat16
    scale = torch.empty(2, 3) if op is Op.QUANTIZE else None
    target = torch.empty(source.shape).to(dtype)
    return Task(op=op, source=source, offset=(0, 0), target=target, scale=scale, format=BlockFormat())


def rows_task(source: torch.Tensor) -> Task:
    """One scale per row."""
    target = torch.empty(source.shape).to(torch.float8_e4m3fn)
    scale = torch.empty(len(source), 1)
    return Task(op=Op.QUANTIZE, source=source, offset=(0, 0), target=target, scale=scale, format=PER_ROW)


def groups_task(source: torch.Tensor, placement: Placement) -> Task:
    """MXFP8."""
    rows, columns = source.shape
    block_format = replace(MXFP8, placement=placement)
    shape = (columns // 16, rows // 64, 1024) if block_format.is_tiled else (rows, columns)
    scales = (columns // 32, rows // 64, 64) if block_format.is_tiled else (rows, columns // 32)
    return Task(
        op=Op.QUANTIZE,
        source=source,
        offset=(0, 0),
        target=torch.empty(shape).to(torch.float8_e4m3fn),
        scale=torch.empty(scales, dtype=torch.uint8),
        format=block_format,
    )


def levels_tasks(source: torch.Tensor, placement: Placement) -> list[Task]:
    """NVFP4."""
    rows, columns = source.shape
    block_format, maximum = replace(NVFP4, placement=placement), torch.zeros(1)
    shape = (columns // 16, rows // 64, 512) if block_format.is_tiled else (rows, columns // 2)
    scales = (columns // 16, rows // 64, 64) if block_format.is_tiled else (rows, columns // 16)
    common = {"source": source, "offset": (0, 0), "format": block_format}
    written = {"target": torch.empty(shape, dtype=torch.uint8), "scale": torch.empty(scales).to(torch.float8_e4m3fn)}
    return [
        Task(op=Op.MAXIMUM, target=maximum, box_shape=tuple(source.shape), **common),
        Task(op=Op.QUANTIZE, global_scale=torch.empty(()), maximum=maximum, own_maximum=maximum, **written, **common),
    ]


def shared_tasks(source: torch.Tensor) -> list[Task]:
    """One scale for all of a matrix."""
    target, maximum = torch.empty(source.shape).to(torch.float8_e4m3fn), torch.zeros(1)
    common = {"source": source, "offset": (0, 0), "format": PER_TENSOR}
    return [
        Task(op=Op.MAXIMUM, target=maximum, box_shape=tuple(source.shape), **common),
        Task(op=Op.QUANTIZE, target=target, scale=torch.empty(1, 1), maximum=maximum, **common),
    ]


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret is False, "kernels are compiled, not interpreted"
    main()
