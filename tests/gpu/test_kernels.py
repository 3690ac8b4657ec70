"""The native Triton kernels against the specification on the CPU, bit for bit, and against vLLM's own casts."""

import pytest
import torch

from fp8refit import NonFiniteError, quantize_blockwise
from fp8refit.kernels import Maxima, quantize_activations
from fp8refit.kernels.reference import dequantize_reference, quantize_reference
from fp8refit.kernels.table import compile_table
from fp8refit.kernels.work import Task
from fp8refit.live.formats import FLOAT_SCALES, BlockFormat, ScaleFormat
from fp8refit.live.slots import Op

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SHAPES = [(1, 1), (127, 129), (128, 128), (129, 127), (256, 384), (1, 4096), (300, 272), (4096, 11008)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = [scale_format.value for scale_format in FLOAT_SCALES]
BLOCKS = [(128, 128), (64, 64), (1, 128), (32, 128), (96, 80)]


def log_uniform(rows, cols, dtype, *, low=-30.0, high=38.4):
    """Random signs, magnitudes log-uniform by block, with outliers, zeros and denormals among them."""
    torch.manual_seed(rows * 31 + cols)
    exponent = torch.empty(-(-rows // 64), -(-cols // 64)).uniform_(low, high)
    exponent = exponent.repeat_interleave(64, 0)[:rows].repeat_interleave(64, 1)[:, :cols]
    values = torch.randn(rows, cols).double() * 10.0 ** exponent.double()
    values[::7, ::5] *= 50
    values[::11, ::3] = 0
    values[: rows // 4, : cols // 4] = 0
    values[rows // 2 :: 9, ::13] = 1e-40
    values[::5, ::7] = -0.0
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def assert_same_bits(gpu, cpu):
    kind = {1: torch.uint8, 4: torch.int32}[cpu.element_size()]
    assert torch.equal(gpu.cpu().view(kind), cpu.view(kind))


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_kernel_equals_cpu_reference(shape, dtype, scale_format):
    weight = log_uniform(*shape, dtype)
    codes, scale, _ = quantize_reference(weight, BlockFormat(scale_format=ScaleFormat(scale_format)))
    native_codes, native_scale = quantize_blockwise(weight.cuda(), scale_format=scale_format)
    assert_same_bits(native_codes, codes)
    assert_same_bits(native_scale, scale)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("block_size", BLOCKS)
def test_native_kernel_equals_reference_in_every_block_size(block_size, scale_format):
    weight = log_uniform(300, 272, torch.bfloat16)
    codes, scale, _ = quantize_reference(
        weight, BlockFormat(scale_format=ScaleFormat(scale_format), block_size=block_size)
    )
    native = quantize_blockwise(weight.cuda(), block_size=block_size, scale_format=scale_format)
    assert_same_bits(native[0], codes)
    assert_same_bits(native[1], scale)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_where_their_tensors_are_whatever_device_is_current():
    from fp8refit.kernels.triton_groups import quantize_groups
    from fp8refit.kernels.triton_merge import add_product_triton

    there = torch.device("cuda", 1)
    x = log_uniform(256, 384, torch.bfloat16, low=-3.0, high=3.0)
    codes, scale = quantize_groups(x.to(there), ScaleFormat.FP32)
    expected_codes, expected_scale = quantize_activations(x, BlockFormat())
    assert_same_bits(codes, expected_codes)
    assert torch.equal(scale.cpu(), expected_scale)
    up, down = torch.eye(256, 16, dtype=torch.bfloat16), torch.eye(16, 384, dtype=torch.bfloat16)
    merged = add_product_triton(x.to(there), up.to(there), down.to(there), 1.0, out=torch.empty_like(x, device=there))
    assert torch.equal(merged.cpu(), x + up @ down)
    maxima = Maxima(1, there)
    maxima.update(0, [x.to(there)])
    assert maxima.read() == [x.abs().amax().item()]


@pytest.mark.parametrize("scale_format", FORMATS)
def test_reference_gives_the_same_bits_on_gpu_and_cpu(scale_format):
    weight = log_uniform(512, 640, torch.float32)
    on_cpu = quantize_reference(weight, BlockFormat(scale_format=ScaleFormat(scale_format)))
    on_gpu = quantize_reference(weight.cuda(), BlockFormat(scale_format=ScaleFormat(scale_format)))
    assert_same_bits(on_gpu[0], on_cpu[0])
    assert_same_bits(on_gpu[1], on_cpu[1])


@pytest.mark.parametrize("view", ["columns", "transposed", "every_second_row", "unaligned", "every_second_column"])
def test_strided_sources(view):
    base = log_uniform(520, 648, torch.bfloat16)
    cut = {
        "columns": lambda t: t[:, 128:384],
        "transposed": lambda t: t.t(),
        "every_second_row": lambda t: t[::2],
        "unaligned": lambda t: t[1:, 3:],
        "every_second_column": lambda t: t[:, ::2],
    }[view]
    codes, scale, _ = quantize_reference(cut(base).contiguous(), BlockFormat())
    native = quantize_blockwise(cut(base.cuda()))
    assert_same_bits(native[0], codes)
    assert_same_bits(native[1], scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_values_are_found_wherever_they_are(value, dtype):
    for row, col in ((0, 0), (127, 128), (299, 271)):
        weight = torch.zeros(300, 272, dtype=dtype, device="cuda")
        weight[row, col] = value
        with pytest.raises(NonFiniteError):
            quantize_blockwise(weight)


@pytest.mark.parametrize(("source", "target"), [(a, b) for a in DTYPES for b in DTYPES])
def test_copies_equal_torch(source, target):
    values = torch.randn(257, 129).to(source).cuda()
    place = torch.zeros(257, 200, dtype=target, device="cuda")[:, 7:136]
    table = compile_table([Task(op=Op.COPY, source=values, offset=(0, 0), target=place)], place.device)
    table.launch(check=True)
    assert table.bad_tasks() == []
    assert torch.equal(place, values.to(target))


def test_a_table_of_many_kinds_flags_exactly_the_bad_tasks():
    sources = [torch.randn(130, 140, device="cuda").to(dtype) for dtype in DTYPES for _ in range(30)]
    sources[17][129, 139] = float("nan")
    sources[71][0, 0] = float("inf")
    tasks = [
        Task(
            op=Op.QUANTIZE,
            source=source,
            offset=(0, 0),
            target=torch.empty(130, 140, dtype=torch.float8_e4m3fn, device="cuda"),
            scale=torch.empty(2, 2, device="cuda"),
            format=BlockFormat(),
        )
        for source in sources
    ]
    table = compile_table(tasks, sources[0].device)
    table.launch(check=True)
    assert table.bad_tasks() == [17, 71]
    table.launch(check=False)
    assert table.bad_tasks() == []


def maxima_of_every_magnitude(num_blocks=64):
    """Blocks whose maxima are log-uniform, zero, 1e-6, and exactly 448 and 464 times a power of two."""
    torch.manual_seed(5)
    weight = torch.randn(num_blocks * 128, 128, device="cuda")
    blocks = weight.view(num_blocks, 128 * 128)
    amax = 10.0 ** torch.empty(num_blocks, 1, device="cuda").uniform_(-8, 4)
    amax[0] = 0
    amax[1] = 1e-6
    for index, value in enumerate((448.0, 464.0, 465.0, 463.0, 232.0, 224.0, 1.8125, 1.75)):
        amax[2 + index] = value
    blocks *= amax / blocks.abs().amax(1, keepdim=True)
    return weight


def test_vllms_requantization_is_the_identity_on_ue8m0():
    fp8_utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.fp8_utils")
    weight = torch.cat([maxima_of_every_magnitude(), torch.randn(2048, 128, device="cuda") * 0.02])
    codes, scale = quantize_blockwise(weight.to(torch.bfloat16), scale_format="ue8m0")
    boot_codes, boot_scale = codes.clone(), scale.clone()
    fp8_utils.requant_weight_ue8m0_inplace(boot_codes, boot_scale, [128, 128])
    assert torch.equal(boot_scale, scale)
    assert torch.equal(boot_codes.view(torch.uint8), codes.view(torch.uint8))


def every_value_below_every_maximum(dtype):
    """A block for each maximum in [1, 2), with each of its values below it in many magnitudes. Powers of two change nothing."""
    steps = {torch.bfloat16: 128, torch.float16: 1024}[dtype]
    mantissas = 1 + torch.arange(steps, device="cuda") / steps
    exponents = -(torch.arange(128 * 128 // steps, device="cuda") % 10.0)
    values = (mantissas[:, None] * exponents.exp2()).flatten()
    blocks = values.expand(steps, -1).minimum(mantissas[:, None]).to(dtype)
    return blocks.reshape(steps * 128, 128)


@pytest.mark.parametrize(
    ("dtype", "stance"),
    [
        (torch.bfloat16, "default"),
        (torch.bfloat16, "force_eager"),
        (torch.float16, "force_eager"),  # compiled it differs at ties; docs/arithmetic.md
    ],
)
def test_vllms_own_cast_is_the_reciprocal_format(dtype, stance):
    deep_gemm = pytest.importorskip("vllm.utils.deep_gemm")
    random = torch.randn(2048, 640, device="cuda") * 0.02
    for weight in (maxima_of_every_magnitude(), random, every_value_below_every_maximum(dtype)):
        weight = weight.to(dtype)
        with torch.compiler.set_stance(stance):
            codes, scale = deep_gemm.per_block_cast_to_fp8(weight, [128, 128], False)
        own_codes, own_scale = quantize_blockwise(weight, scale_format="fp32_reciprocal")
        assert_same_bits(own_scale, scale.cpu())
        assert_same_bits(own_codes, codes.cpu())


@pytest.mark.parametrize("scale_format", FORMATS)
def test_error_is_no_larger_than_that_of_vllms_own_cast(scale_format):
    deep_gemm = pytest.importorskip("vllm.utils.deep_gemm")
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) * 0.02
    weight[:, ::512] *= 12
    theirs = dequantize_reference(
        *deep_gemm.per_block_cast_to_fp8(weight, [128, 128], scale_format == "ue8m0"), (128, 128)
    )
    ours = dequantize_reference(*quantize_blockwise(weight, scale_format=scale_format), (128, 128))
    error = [(x - weight.float()).square().mean().item() for x in (ours, theirs)]
    assert error[0] <= error[1] * 1.005
