"""Compiles what every refit launches, so that the first one shows what it takes by itself."""

import time

import torch

from fp8refit.kernels.work import Task
from fp8refit.live.formats import BlockFormat
from fp8refit.live.slots import FP8_DTYPE, Op


def compile_kernels() -> float:
    """Compile them in the process that refits: an engine's process may have a cache of Triton's of its own. Returns seconds."""
    if not torch.cuda.is_available():
        return 0.0
    from fp8refit.kernels.triton_table import TritonTable

    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.zeros(256, 256, dtype=torch.bfloat16, device=device)
    codes, scale = torch.zeros_like(source, dtype=FP8_DTYPE), torch.zeros(2, 2, device=device)
    quantize = Task(op=Op.QUANTIZE, source=source, offset=(0, 0), target=codes, scale=scale, format=BlockFormat())
    copy = Task(op=Op.COPY, source=source, offset=(0, 0), target=torch.zeros_like(source))
    start_s = time.perf_counter()
    TritonTable([quantize, copy], device).launch(check=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start_s
