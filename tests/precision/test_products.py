"""Products and their gradients against the straight-through definition, in double precision."""

import pytest
import torch
from torch import nn

from fp8refit import dequantize_blockwise, precision, quantize_blockwise
from fp8refit.kernels import quantize_activations
from fp8refit.slots import ScaleFormat
from tests.precision.models import layout_of, make_trainer, moe_layout, slot, ste

FORMATS = list(ScaleFormat)


def served_value(weight, scale_format):
    """What an engine's codes of a matrix, or of each of a stack, mean."""
    if weight.ndim == 3:
        return torch.stack([served_value(matrix, scale_format) for matrix in weight])
    codes, scale = quantize_blockwise(weight.detach().bfloat16(), scale_format=scale_format)
    return dequantize_blockwise(codes, scale).double()


def input_value(x, scale_format):
    codes, scale = quantize_activations(x.detach().float().reshape(-1, x.shape[-1]), scale_format)
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
    torch.testing.assert_close(y.double(), torch.stack(rows), rtol=1e-4, atol=1e-3)
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
