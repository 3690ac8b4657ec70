"""Triton's CPU interpreter with casts that round as the hardware does.

Its own `_convert_float` (3.7 to 3.9) truncates fp32 -> bf16 and gets 2-3 % of fp32 -> E4M3 wrong: a carry out of the
mantissa is lost, ties do not go to even, subnormals become large. Its products take bits of bf16 for integers. Its `fma`
rounds twice.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl

_TORCH_DTYPES = {
    tl.float32: torch.float32,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def convert_float(values: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    """The bits of `values` in `target`, rounded to nearest even by torch."""
    source_dtype, target_dtype = _TORCH_DTYPES[source], _TORCH_DTYPES[target]
    integers = np.frombuffer(values.tobytes(), dtype=f"i{source_dtype.itemsize}").copy()
    converted = torch.from_numpy(integers).view(source_dtype).to(target_dtype)
    return converted.view(_INTEGERS[target_dtype.itemsize]).numpy().reshape(values.shape)


def create_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """`x * y + z` of float32 values, rounded once."""
    from triton.runtime.interpreter import TensorHandle

    product = x.data.astype(np.float64) * y.data  # exact
    total = product + z.data
    one = total - product
    lost = (product - (total - one)) + (z.data - one)  # Knuth's: what the sum has lost, exactly
    is_odd = total.view(np.int64) & 1 == 1
    toward = np.where(lost > 0, np.inf, -np.inf)
    to_odd = np.where((lost != 0) & ~is_odd & np.isfinite(total), np.nextafter(total, toward), total)
    return TensorHandle(to_odd.astype(np.float32), z.dtype.scalar)


def create_dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """A product of tiles, added up in the dtype of `d`."""
    from triton.runtime.interpreter import TensorHandle

    product = np.matmul(_values(a), _values(b), dtype=d.data.dtype)
    return TensorHandle(product + d.data, d.dtype.scalar)


def _values(tile: Any) -> np.ndarray:
    if tile.dtype.scalar != tl.bfloat16:
        return tile.data
    return (tile.data.astype(np.uint32) << 16).view(np.float32)
