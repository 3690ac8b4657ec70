"""The quantizers of nvidia-modelopt and of compressed-tensors, from their wheels, beside ours where they define a format.

Both divide by the scale. So do we per row; per block and per weight we multiply by the reciprocal, as the engines' kernels do,
and codes may differ where a quotient lies at a midpoint.
"""

import warnings

import pytest
import torch

from fp8refit import quantize_blockwise
from fp8refit.live.formats import MXFP8, NVFP4, PER_ROW, PER_TENSOR, BlockFormat

SEEDS = range(20)
NUM_ROWS, NUM_COLUMNS = 256, 512
FLOOR = 2.0**-9
"""The least `amax` of a row, as vLLM has it. Both know none."""


@pytest.fixture(scope="module")
def modelopt():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses what torch deprecates
        return pytest.importorskip("modelopt.torch.quantization.qtensor")


@pytest.fixture(scope="module")
def compressed():
    """Quantizes in the strategy of a scheme."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("compressed_tensors.quantization")
        from compressed_tensors.quantization.lifecycle.forward import quantize
        from compressed_tensors.quantization.utils import calculate_qparams

    def run(weight, scales_of, **scheme):
        args = quantization.QuantizationArgs(num_bits=8, type="float", symmetric=True, dynamic=False, **scheme)
        scale, zero = calculate_qparams(*scales_of, args)
        return quantize(weight, scale, zero, args, dtype=torch.float8_e4m3fn), scale

    return run


def weights():
    """BF16 values in float32, with outlier channels: 2.6 million of them."""
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(NUM_ROWS, NUM_COLUMNS, generator=generator) * 2.0 ** (seed - 12)
        weight[:, seed::97] *= 40
        weight[seed, seed] = 1e3
        yield weight.bfloat16().float()


def hard_cases(num_columns):
    """Rows of midpoints between two codes, of the largest values, of zeros, and of both signs, all with a scale of one."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    rows = [middles, -middles, codes, torch.zeros(1), torch.tensor([448.0, -447.0, 2.0**-10, -(2.0**-10)])]
    weight = torch.zeros(len(rows), num_columns)
    for row, values in zip(weight, rows, strict=True):
        row[: len(values)] = values
        if values.any():
            row[-1] = 448.0
    return weight


def same(codes, others):
    return torch.equal(codes.view(torch.uint8), others.view(torch.uint8))


def every_weight():
    yield from weights()
    yield hard_cases(NUM_COLUMNS)


def test_rows_are_those_of_both(modelopt, compressed):
    for weight in every_weight():
        ours, scale = quantize_blockwise(weight, format=PER_ROW)
        amax = weight.abs().amax(1, keepdim=True)
        has_no_floor = (amax >= FLOOR)[:, 0]
        codes, theirs = compressed(weight, (weight.amin(1, True), weight.amax(1, True)), strategy="channel")
        found, optimum = modelopt.FP8QTensor.quantize(weight, axis=0)
        for other, other_scale in ((codes, theirs), (found._quantized_data, optimum)):
            assert torch.equal(other_scale.reshape(scale.shape)[has_no_floor], scale[has_no_floor])
            assert same(other[has_no_floor], ours[has_no_floor])


@pytest.mark.parametrize("block_format", [BlockFormat(), PER_TENSOR], ids=str)
def test_scales_of_blocks_and_of_weights_are_those_of_both_and_codes_but_for_midpoints(
    block_format, modelopt, compressed
):
    num_other, num_codes = 0, 0
    for weight in weights():
        ours, scale = quantize_blockwise(weight, format=block_format)
        if block_format.is_shared:
            codes, theirs = compressed(weight, (weight.amin(), weight.amax()), strategy="tensor")
            found, optimum = modelopt.FP8QTensor.quantize(weight, axis=None)
        else:
            blocks = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2)
            bounds = blocks.amin((2, 3)), blocks.amax((2, 3))
            codes, theirs = compressed(weight, bounds, strategy="block", block_structure=[128, 128])
            found, optimum = modelopt.FP8QTensor.quantize(weight, block_sizes={0: 128, 1: 128})
        assert same(codes, found._quantized_data)
        assert torch.equal(theirs.reshape(scale.shape), scale) and torch.equal(optimum.reshape(scale.shape), scale)
        is_other = codes.view(torch.uint8) != ours.view(torch.uint8)
        num_other, num_codes = num_other + int(is_other.sum()), num_codes + is_other.numel()
        repeats = (1, 1) if block_format.is_shared else (128, 128)
        quotient = (weight / scale.repeat_interleave(repeats[0], 0).repeat_interleave(repeats[1], 1))[is_other]
        middle = (codes.float()[is_other] + ours.float()[is_other]) / 2
        assert torch.all((quotient - middle).abs() <= quotient.abs() * 2.0**-22), "no midpoint"
    assert num_other <= 1e-3 * num_codes


def test_mxfp8_is_modelopts(modelopt):
    for weight in every_weight():
        ours, scale = quantize_blockwise(weight, format=MXFP8)
        found, theirs = modelopt.MXFP8QTensor.quantize(weight)
        assert torch.equal(theirs, scale)
        assert same(found._quantized_data, ours)


@pytest.mark.parametrize("spread", [0, 3, 12])
def test_nvfp4_is_modelopts(spread, modelopt):
    """With blocks of zeros, and some whose scales are at their least."""
    generator = torch.Generator().manual_seed(spread)
    for weight in every_weight():
        powers = torch.exp2(torch.randn(len(weight), NUM_COLUMNS // 16, generator=generator) * spread)
        spread_out = (weight * powers.repeat_interleave(16, 1)).bfloat16().float()
        spread_out[2, 32:80] = 0
        found, theirs, over_all = modelopt.NVFP4QTensor.quantize(spread_out, 16)
        ours, scale, own_over_all = quantize_blockwise(spread_out, format=NVFP4)
        assert torch.equal(own_over_all, over_all.reshape(1))
        assert same(theirs, scale)
        assert same(found._quantized_data, ours)
