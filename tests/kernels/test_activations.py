"""Inputs of block-FP8 products, against a quantizer in numpy that goes by the formula of vLLM's and SGLang's kernels."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8refit.kernels import quantize_activations
from fp8refit.live.formats import FLOAT_SCALES, BlockFormat, ScaleFormat


def by_formula(x, scale_format, group):
    """`per_token_group_quant_fp8` in double precision, rounded where the kernel rounds."""
    rows, cols = x.shape
    codes, scales = np.zeros((rows, cols), np.uint8), np.zeros((rows, -(-cols // group)), np.float32)
    for first in range(0, cols, group):
        part = x[:, first : first + group].astype(np.float64)
        scale = (np.maximum(np.abs(part).max(1), np.float32(1e-10)) / 448).astype(np.float32)
        if scale_format is ScaleFormat.UE8M0:
            mantissa, exponent = np.frexp(scale.astype(np.float64))
            scale = np.ldexp(1.0, exponent - (mantissa == 0.5)).astype(np.float32)
        quotient = (part / scale.astype(np.float64)[:, None]).astype(np.float32)
        codes[:, first : first + group] = quotient.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        scales[:, first // group] = scale
    return codes, scales


@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
@pytest.mark.parametrize(("cols", "group"), [(256, 128), (200, 128), (96, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_code_and_scale_is_what_the_formula_says(scale_format, cols, group, dtype):
    torch.manual_seed(0)
    x = torch.randn(64, cols) * torch.exp2(torch.randint(-40, 20, (64, 1)))
    x[0], x[1] = 0, 1e-12
    for row, peak in enumerate([448.0, 449.0, 464.0, 465.0, 896.0, 1.75], start=2):  # where powers of two change
        x[row] = x[row].clamp(-1, 1) * 0.5
        x[row, 3] = peak
    x = x.to(dtype)
    codes, scale = quantize_activations(x, BlockFormat(scale_format=scale_format, block_size=(1, group)))
    expected_codes, expected_scale = by_formula(x.float().numpy(), scale_format, group)
    assert np.array_equal(scale.numpy(), expected_scale)
    assert np.array_equal(codes.view(torch.uint8).numpy(), expected_codes)


@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(128, 256), (1, 128), (200, 384), (130, 100)])
def test_one_launch_quantizes_either_way_with_the_same_bits(device, scale_format, is_transposed, shape):
    from fp8refit.kernels.triton_groups import quantize_groups

    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.exp2(torch.randint(-40, 20, (shape[0], 1)))).bfloat16()
    x[0, :64] = 0
    whole = torch.zeros([-(-size // 128) * 128 for size in shape], dtype=x.dtype)
    whole[: shape[0], : shape[1]] = x
    seen = whole.t().contiguous() if is_transposed else whole
    expected = quantize_activations(seen, BlockFormat(scale_format=scale_format))
    codes, scale = quantize_groups(x.to(device), scale_format, is_transposed=is_transposed)
    assert codes.is_contiguous() and scale.t().is_contiguous()
    assert torch.equal(codes.view(torch.uint8).cpu(), expected[0].view(torch.uint8))
    assert torch.equal(scale.cpu(), expected[1])


@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(device, scale_format, bad):
    """A gradient that is NaN and comes out finite is a step that no trainer would have taken."""
    from fp8refit.kernels.triton_groups import quantize_groups

    torch.manual_seed(0)
    x = torch.randn(128, 256)
    x[3, 130], x[5] = bad, bad
    expected_codes, expected_scale = quantize_activations(x, BlockFormat(scale_format=scale_format))
    codes, scale = quantize_groups(x.to(device), scale_format)
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(codes.float().cpu(), expected_codes.float(), rtol=0, atol=0, equal_nan=True)
    assert codes[3, 130].isnan() and codes[5].isnan().all()
