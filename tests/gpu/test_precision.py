"""A trainer in its engine's precision on a real GPU: products, gradients, mismatch with vLLM, and what a step takes.

    pip install torchao && python -m pytest tests/gpu/test_precision.py

`FP8REFIT_LAYERS` (8) says how many layers of the 8B shape are stepped through. The curve of learning beside the others:

    python examples/grpo.py --engine vllm --size small --variants bf16,fp8,fp8+token,unified --seeds 0,1,2 --out FOLDER
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8refit import dequantize_blockwise, quantize_blockwise
from fp8refit.kernels import quantize_activations
from fp8refit.live.formats import FLOAT_SCALES, BlockFormat
from fp8refit.training import precision
from fp8refit.training.precision.products import has_fp8_products
from tests.gpu.scripts import RESULTS, card, run_scenario
from tests.training.precision.changes import OPTIMIZERS, WHOLE_CHANGES
from tests.training.precision.models import layout_of, slot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(1200),
]
LAYERS = os.environ.get("FP8REFIT_LAYERS", "8")
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit")) / "precision"
SHAPES = ("qwen3-0.6b-untied", "qwen3-8b")
WEIGHTS = ("ordinary", "outliers")


def measured(name, *arguments):
    kind = card(torch.cuda.get_device_name())
    out, log = RESULTS / f"precision_{name}_{kind}.json", f"precision_{name}"
    return run_scenario("precision", [*arguments, "--work", WORK], out=out, log=log, timeout_s=600)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.fixture
def needs_products():
    if find_spec("torchao") is None or not has_fp8_products(torch.device("cuda", 0)):
        pytest.skip("needs torchao and a GPU that multiplies block FP8")


@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("tokens", [1, 100, 512])
def test_products_and_gradients_are_those_of_the_definition(needs_products, scale_format, compiles, tokens):
    torch.manual_seed(0)
    rows, cols = 768, 640  # five blocks of columns: scales that are padded
    model = nn.Sequential(nn.Linear(cols, rows, bias=False)).cuda().bfloat16()
    precision.unify(model, like=layout_of([slot("0.weight", (rows, cols), scale_format)]))
    x = torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16)
    codes, scale = quantize_blockwise(model[0].weight, scale_format=scale_format)
    served = dequantize_blockwise(codes, scale).double()
    taken = dequantize_blockwise(
        *quantize_activations(x.detach(), BlockFormat(scale_format=scale_format)), block_size=(1, 128)
    ).double()
    model(x)  # the codes are there
    torch._dynamo.reset()  # it compiles a function for eight formats at most
    y = (torch.compile(model[0], fullgraph=True) if compiles else model[0])(x)
    y.backward(gradient)
    # The products are exact but for the rounding of the result; gradients are FP8 in one more operand.
    assert relative(y, taken @ served.t()) < 5e-3
    assert relative(x.grad, gradient.double() @ served) < 0.05
    assert relative(model[0].weight.grad, gradient.double().t() @ taken) < 0.06


def test_codes_on_the_gpu_are_those_of_the_cpu():
    torch.manual_seed(1)
    for scale_format in FLOAT_SCALES:
        like = layout_of([slot("0.weight", (768, 640), scale_format)])
        model = nn.Sequential(nn.Linear(640, 768, bias=False))
        expected = quantize_blockwise(model[0].weight.bfloat16(), scale_format=scale_format)
        served = precision.unify(model.cuda(), like=like).served()
        assert torch.equal(served["0.weight"].view(torch.uint8).cpu(), expected[0].view(torch.uint8))
        assert torch.equal(served["0.weight_scale_inv"].cpu(), expected[1])


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_mismatch_with_vllm_halves(needs_products, shape):
    measured(f"mismatch_{shape}_bf16", "mismatch", "--shape", shape, "--bf16")
    found = measured(f"mismatch_{shape}", "mismatch", "--shape", shape)
    for weights in WEIGHTS:
        assert found[weights]["num_quantized"] == 0
        assert found[weights]["unified"]["k3"] <= found[weights]["plain"]["k3"] / 2, found


@pytest.mark.parametrize("change", WHOLE_CHANGES)
def test_the_next_forward_pass_computes_with_what_changed(change):
    if change == "write_from_elsewhere":
        pytest.skip("writes through numpy")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(640, 768, bias=False), nn.Linear(768, 256, bias=False)).cuda().bfloat16()
    slots = [slot(name, tensor.shape, "fp32") for name, tensor in model.state_dict().items()]
    unified = precision.unify(model, like=layout_of(slots))
    x = torch.ones(2, 640, device="cuda", dtype=torch.bfloat16)
    model(x)
    WHOLE_CHANGES[change](model)
    model(x)
    for layer in model:
        codes, scale = quantize_blockwise(layer.weight.detach())
        assert torch.equal(layer.trained_weight.codes.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(layer.trained_weight.scale, scale)
    assert unified.refresh() == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_step_is_seen(optimizer):
    if optimizer == "Adagrad fused":
        pytest.skip("torch fuses Adagrad on CPUs alone")
    kind, options = OPTIMIZERS[optimizer]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(640, 768, bias=False), nn.Linear(768, 256, bias=False)).cuda()
    precision.unify(
        model, like=layout_of([slot(name, tensor.shape, "fp32") for name, tensor in model.state_dict().items()])
    )
    trainer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        model(torch.ones(2, 640, device="cuda")).square().mean().backward()
        for layer in model:
            codes, scale = quantize_blockwise(layer.weight.detach().bfloat16())
            assert torch.equal(layer.trained_weight.codes.view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(layer.trained_weight.scale, scale)
        trainer.step()
        trainer.zero_grad()


def test_a_backward_pass_of_an_older_step_is_refused():
    model = nn.Sequential(nn.Linear(640, 768, bias=False)).cuda()
    unified = precision.unify(model, like=layout_of([slot("0.weight", (768, 640), "fp32")]))
    x = torch.ones(2, 640, device="cuda", requires_grad=True)
    (model(x) + model(x)).sum().backward()
    old = model(x).sum()
    model[0].weight.data.neg_()
    assert unified.refresh() == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_a_step_is_faster_than_in_bf16(needs_products):
    found = measured("step", "step", "--layers", LAYERS)
    assert found["speedup"]["fp32"] >= 1.1, found["median_s"]
    # Weights are compared before each forward pass, which is included above.
    assert found["compare_s"] <= 0.04 * found["median_s"]["fp32"], found["compare_s"]
