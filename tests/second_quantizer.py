"""A quantizer that shares nothing with fp8refit's: the rules of `quantize_blockwise` once more, in NumPy and ml_dtypes.

Block by block, in loops, with exact integer arithmetic for powers of two: slow, and plain to read against the specification.
"""

from fractions import Fraction
from math import ceil, frexp

import ml_dtypes
import numpy as np
import torch

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = {"fp32": 448, "fp32_floored": 448, "fp32_dividing": 448, "ue8m0": 464}
"""What a block's largest value may be after division by its scale: the last one that still rounds to 448 is 464."""
FLOORS = {"fp32": 1e-10, "fp32_floored": 1e-4, "fp32_reciprocal": 1e-4, "fp32_dividing": 2**-9, "ue8m0": 1e-4}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The values of a tensor of any strides as float32, which holds every BF16 and FP16 number."""
    tensor = tensor.detach().cpu()
    kinds = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16, torch.float32: np.float32}
    width = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
    bits = np.array(tensor.contiguous().view(width).numpy())
    return bits.view(kinds[tensor.dtype]).astype(np.float32)


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 by way of BF16, to nearest even."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def scale_of(amax: np.float32, scale_format: str) -> np.float32:
    """The scale of a block with this largest magnitude."""
    amax = max(amax, np.float32(FLOORS[scale_format]))
    if scale_format == "fp32_reciprocal":
        return np.float32(amax * np.float32(1 / 448))
    if scale_format != "ue8m0":
        return np.float32(amax / np.float32(LARGEST[scale_format]))
    limit, exact = LARGEST["ue8m0"], Fraction(float(amax))
    power = frexp(amax)[1] - 12
    assert exact > limit * Fraction(2) ** power
    while exact > limit * Fraction(2) ** power:
        power += 1
    return np.float32(Fraction(2) ** power)


OVER = {"mx_ceil": 448, "mx_floor": 256, "mx_unit": 1}
"""MXFP8: a block's largest value is at most 448 times the scale, or at least so many times."""
LEAST, MOST = Fraction(2) ** -126, 127


def exponent_of(amax: np.float32, scale_format: str) -> int:
    """The exponent of a scale of MXFP8, whose byte is 127 more."""
    exact, power = max(Fraction(float(amax)), LEAST), -127
    if scale_format == "mx_ceil":
        while exact > 448 * Fraction(2) ** power:
            power += 1
        return power
    while OVER[scale_format] * Fraction(2) ** (power + 1) <= exact:
        power += 1
    return min(power, MOST)


def quantize_groups(values: np.ndarray, columns: int, scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of MXFP8, as bytes, of a finite float32 matrix, with a scale for so many columns of a row."""
    (rows, cols), wide = values.shape, values.astype(np.float64)
    codes, scales = np.zeros((rows, cols), dtype=np.uint8), np.zeros((rows, ceil(cols / columns)), dtype=np.uint8)
    for i in range(rows):
        for j in range(scales.shape[1]):
            where = np.s_[i, j * columns : (j + 1) * columns]
            power = exponent_of(np.abs(values[where]).max(), scale_format)
            scaled = np.clip(np.ldexp(wide[where], -power), -448.0, 448.0)
            codes[where] = scaled.astype(E4M3).view(np.uint8)
            scales[i, j] = power + 127
    return codes, scales


def quantize_two_levels(values: np.ndarray, maximum: float) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Codes (N, K / 2) and scales (N, K / 16) of NVFP4, as bytes, and the scale of the weight, of a finite float32 matrix."""
    rows, cols = values.shape
    over_all = np.float32(max(maximum, 2.0**-100)) / np.float32(2688)
    codes, scales = np.zeros((rows, cols), dtype=np.uint8), np.zeros((rows, cols // 16), dtype=np.uint8)
    for i in range(rows):
        for j in range(cols // 16):
            where = np.s_[i, 16 * j : 16 * j + 16]
            wanted = np.abs(values[where]).max() / (np.float32(6) * over_all)
            wanted = np.float32(1) if wanted == 0 else np.clip(wanted, np.float32(2.0**-9), np.float32(448))
            small = np.array(wanted, dtype=np.float32).astype(E4M3)
            scales[i, j] = small.view(np.uint8)
            with np.errstate(over="ignore", under="ignore"):
                scaled = values[where] / (small.astype(np.float32) * over_all)
            code = np.clip(scaled, np.float32(-6), np.float32(6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
            codes[where] = np.where(values[where] == 0, 0, code)  # zero has no sign here
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, over_all


def quantize(
    values: np.ndarray, block_size: tuple[int, int] = (128, 128), scale_format: str = "fp32"
) -> tuple[np.ndarray, np.ndarray]:
    """Codes as bytes, and float32 scales, of a finite float32 matrix."""
    (rows, cols), (height, width) = values.shape, block_size
    codes = np.zeros((rows, cols), dtype=np.uint8)
    scales = np.zeros((ceil(rows / height), ceil(cols / width)), dtype=np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            block = values[where]
            scales[i, j] = scale = scale_of(np.abs(block).max(), scale_format)
            with np.errstate(over="ignore", under="ignore"):
                scaled = block / scale if scale_format == "fp32_dividing" else block * (np.float32(1) / scale)
                scaled = np.clip(scaled, np.float32(-448), np.float32(448))
            codes[where] = scaled.astype(E4M3).view(np.uint8)
    return codes, scales


def quantize_tensor(
    tensor: torch.Tensor, block_size: tuple[int, int] = (128, 128), scale_format: str = "fp32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize` for a torch matrix: codes (N, K) as float8_e4m3fn, and float32 scales, on the CPU."""
    codes, scales = quantize(to_numpy(tensor), block_size, scale_format)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales)
