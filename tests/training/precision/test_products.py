"""Products and their gradients against the straight-through definition, in double precision."""

import pytest
import torch
from torch import nn

from fp8refit import dequantize_blockwise, quantize_blockwise
from fp8refit.kernels import quantize_activations
from fp8refit.live.formats import FLOAT_SCALES, BlockFormat
from fp8refit.training import precision
from tests.kernels.interpreter import convert_float
from tests.training.precision.models import layout_of, make_trainer, moe_layout, slot, ste

FORMATS = FLOAT_SCALES


def served_value(weight, scale_format):
    """What an engine's codes of a matrix, or of each of a stack, mean."""
    if weight.ndim == 3:
        return torch.stack([served_value(matrix, scale_format) for matrix in weight])
    codes, scale = quantize_blockwise(weight.detach().bfloat16(), scale_format=scale_format)
    return dequantize_blockwise(codes, scale).double()


def input_value(x, scale_format):
    codes, scale = quantize_activations(
        x.detach().float().reshape(-1, x.shape[-1]), BlockFormat(scale_format=scale_format)
    )
    return dequantize_blockwise(codes, scale, block_size=(1, 128)).double().view_as(x)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(("rows", "cols"), [(256, 384), (200, 160)], ids=["whole blocks", "ragged"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_and_its_gradients_are_those_of_the_definition(scale_format, rows, cols, bias):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(cols, rows, bias=bias))
    slots = [slot("0.weight", (rows, cols), scale_format)] + [slot("0.bias", (rows,), dtype="float32")] * bias
    x = (torch.randn(3, 5, cols) * torch.exp2(torch.randint(-9, 5, (3, 5, 1)))).requires_grad_()
    weight = model[0].weight.detach().double().requires_grad_()
    x64, gradient = x.detach().double().requires_grad_(), torch.randn(3, 5, rows)
    expected = ste(x64, input_value(x, scale_format)) @ ste(weight, served_value(weight.float(), scale_format)).t()
    if bias:
        expected = expected + model[0].bias.detach().double()
    expected.backward(gradient.double())
    precision.unify(model, like=layout_of(slots))
    y = model(x)
    y.backward(gradient)
    for got, want in ((y, expected), (x.grad, x64.grad), (model[0].weight.grad, weight.grad)):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("scale_format", FORMATS)
def test_experts_and_their_gradients_are_those_of_the_definition(scale_format):
    model = make_trainer("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter /= parameter.std()
    torch.manual_seed(2)
    x, chosen = torch.randn(24, 256, requires_grad=True), torch.rand(24, 4).topk(2).indices % 3  # none goes to the last
    shares = torch.rand(24, 2, requires_grad=True)
    others = [tensor.detach().double().requires_grad_() for tensor in (x, shares, *experts.parameters())]
    x64, shares64, gate_up, down = others
    served = [ste(held, served_value(held.float(), scale_format)) for held in (gate_up, down)]
    rows = []
    for token in range(24):
        said = 0
        for choice, expert in enumerate(chosen[token].tolist()):
            gate, up = (ste(x64[token], input_value(x64[token], scale_format)) @ served[0][expert].t()).float().chunk(2)
            inner = (nn.functional.silu(gate) * up).double()
            said += shares64[token, choice] * (ste(inner, input_value(inner, scale_format)) @ served[1][expert].t())
        rows.append(said)
    torch.stack(rows).sum().backward()
    precision.unify(model, like=moe_layout(model, scale_format))
    y = experts(x, chosen, shares)
    y.sum().backward()
    torch.testing.assert_close(y.double(), torch.stack(rows), rtol=1e-3, atol=1e-2)
    for got, want in zip((x, shares, *experts.parameters()), others, strict=True):
        # A product in another order may fall on the other side of a rounding of what `down` takes.
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-2, atol=2e-3 * want.grad.abs().max().item())
    assert not experts.gate_up_proj.grad[3].any()


def test_autocast_rounds_inputs_and_not_products():
    model, like = nn.Sequential(nn.Linear(128, 128, bias=False)), layout_of([slot("0.weight", (128, 128), "fp32")])
    precision.unify(model, like=like)
    x = torch.randn(4, 128)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, model(x.bfloat16()))


def torchao_without_a_gpu(monkeypatch):
    """torchao's product by what its operands mean; the quantizer in Triton's interpreter."""
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    grid = kernels._scaling_type_value(kernels.BLOCKWISE_128X128_SCALING_TYPE)

    def multiply(a, b, a_scale, of_a, b_scale, of_b, dtype):
        assert a.stride(1) == 1 and b.stride(0) == 1 and a_scale.stride(0) == 1
        assert a_scale.shape == (a.shape[0], a.shape[1] // 128)
        rows, cols = b.shape
        assert b_scale.shape == ((rows // 128, cols // 128) if of_b == grid else (cols, rows // 128))
        each = b_scale if of_b == grid else b_scale.t()
        wide = each.repeat_interleave(128, 0)
        wide = wide.repeat_interleave(128, 1) if of_b == grid else wide
        return ((a.float() * a_scale.repeat_interleave(128, 1)) @ (b.float() * wide)).to(dtype)

    monkeypatch.setattr(kernels, "blockwise_scaled_mm", multiply)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("triton.runtime.interpreter._convert_float", convert_float)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 200, 256])
def test_products_of_torchao_get_operands_as_they_want_them(monkeypatch, scale_format, tokens):
    torchao_without_a_gpu(monkeypatch)
    monkeypatch.setattr("fp8refit.training.precision.weights.has_fp8_products", lambda device: True)
    torch.manual_seed(3)
    rows, cols = 768, 640
    model = nn.Sequential(nn.Linear(cols, rows, bias=False)).bfloat16()
    with torch.no_grad():
        model[0].weight *= torch.exp2(torch.randint(-6, 6, (rows, 1)))
    precision.unify(model, like=layout_of([slot("0.weight", (rows, cols), scale_format)]))
    x = torch.randn(tokens, cols).bfloat16().requires_grad_()
    gradient = torch.randn(tokens, rows).bfloat16()
    weight, inputs = served_value(model[0].weight, scale_format), input_value(x, scale_format)
    y = model(x)
    y.backward(gradient)
    expected = {
        "y": (y, inputs @ weight.t(), 5e-3),
        "dx": (x.grad, gradient.double() @ weight, 0.05),
        "dw": (model[0].weight.grad, gradient.double().t() @ inputs, 0.06),
    }
    far = {name: ((got.double() - want).norm() / want.norm()).item() for name, (got, want, _) in expected.items()}
    assert all(far[name] < most for name, (_, _, most) in expected.items()), far
