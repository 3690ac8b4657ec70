"""A trainer in its engine's precision, in any order of what trainers do, against the definition and a plain quantizer."""

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8refit import dequantize_blockwise, quantize_blockwise
from fp8refit.kernels import quantize_activations
from fp8refit.live.formats import FLOAT_SCALES, BlockFormat, ScaleFormat
from fp8refit.training import precision
from tests.training.precision.changes import OPTIMIZERS, WHOLE_CHANGES
from tests.training.precision.models import layout_of, slot

FORMATS = st.sampled_from([kind.value for kind in FLOAT_SCALES])
SHAPES = st.sampled_from([(128, 128), (256, 130), (3, 200), (130, 257)])
SEEDS = st.integers(0, 1 << 16)


def make_model(shape, seed, dtype=torch.float32):
    torch.manual_seed(seed)
    rows, cols = shape
    model = nn.Sequential(nn.Linear(cols, rows, bias=False), nn.Linear(rows, 8, bias=False)).to(dtype)
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(torch.exp2(torch.randint(-12, 8, (len(layer.weight), 1))))
    return model


def layout(model, scale_format):
    return layout_of([slot(name, tensor.shape, scale_format) for name, tensor in model.state_dict().items()])


def loss_of(y):
    """Its gradient is smaller for larger outputs, so that weights stay finite in any number of steps."""
    return nn.functional.normalize(y, dim=-1)[:, 0].sum()


def values(weight, scale_format):
    return dequantize_blockwise(*quantize_blockwise(weight.detach().bfloat16(), scale_format=scale_format)).double()


def taken(x, scale_format):
    codes, scale = quantize_activations(x.detach(), BlockFormat(scale_format=ScaleFormat(scale_format)))
    return dequantize_blockwise(codes, scale, block_size=(1, 128)).double()


@given(shape=SHAPES, scale_format=FORMATS, seed=SEEDS, tokens=st.integers(1, 9))
def test_products_and_gradients_are_those_of_the_definition(shape, scale_format, seed, tokens):
    model = make_model(shape, seed)[:1]
    weight = values(model[0].weight, scale_format)
    precision.unify(model, like=layout(model, scale_format))
    x = (torch.randn(tokens, shape[1]) * torch.exp2(torch.randint(-12, 8, (tokens, 1)))).requires_grad_()
    gradient = torch.randn(tokens, shape[0])
    y = model(x)
    y.backward(gradient)
    inputs = taken(x, scale_format)
    for got, want in (
        (y, inputs @ weight.t()),
        (x.grad, gradient.double() @ weight),
        (model[0].weight.grad, gradient.double().t() @ inputs),
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


class Trainer(RuleBasedStateMachine):
    """What is served and computed is always what the masters are."""

    @initialize(shape=SHAPES, scale_format=FORMATS, seed=SEEDS)
    def begin(self, shape, scale_format, seed):
        self.scale_format = scale_format
        self.model = make_model(shape, seed)
        self.unified = precision.unify(self.model, like=layout(self.model, scale_format))
        self.copies = []

    @rule(change=st.sampled_from([*WHOLE_CHANGES]))
    def write(self, change):
        WHOLE_CHANGES[change](self.model)

    @rule(change=st.sampled_from([*WHOLE_CHANGES]))
    def write_and_serve(self, change):
        WHOLE_CHANGES[change](self.model)
        self.check_served()

    @rule(optimizer=st.sampled_from([*OPTIMIZERS]), reentrant=st.sampled_from([None, False, True]))
    def step(self, optimizer, reentrant):
        kind, options = OPTIMIZERS[optimizer]
        x = torch.ones(2, self.model[0].in_features).requires_grad_()
        for _ in range(2):  # micro-batches
            y = self.model(x) if reentrant is None else checkpoint(self.model, x, use_reentrant=reentrant)
            loss_of(y).backward()
        kind(self.model.parameters(), lr=0.1, **options).step()
        self.model.zero_grad()

    @rule(optimizer=st.sampled_from([*OPTIMIZERS]))
    def step_within_the_backward_pass(self, optimizer):
        kind, options = OPTIMIZERS[optimizer]
        hooks = [
            weight.register_post_accumulate_grad_hook(lambda weight: kind([weight], lr=0.1, **options).step())
            for weight in self.model.parameters()
        ]
        x = torch.ones(2, self.model[0].in_features)
        loss_of(checkpoint(self.model, x, use_reentrant=False)).backward()
        self.model.zero_grad()
        for hook in hooks:
            hook.remove()

    @rule(seed=SEEDS)
    def load(self, seed):
        other = make_model(tuple(self.model[0].weight.shape), seed)
        self.model.load_state_dict(other.state_dict())

    @rule()
    def go_on_with_a_copy(self):
        self.copies = [(self.model, self.said(self.model))]
        self.model, self.unified = copy.deepcopy((self.model, self.unified))

    @rule()
    def check_served(self):
        served = self.unified.served()
        for name, master in self.model.state_dict().items():
            codes, scale = quantize_blockwise(master.bfloat16(), scale_format=self.scale_format)
            assert torch.equal(served[name].view(torch.uint8), codes.view(torch.uint8)), name
            assert torch.equal(served[f"{name}_scale_inv"], scale), name

    @rule(number=st.sampled_from([0, 1]))
    def call_a_part(self, number):
        layer = self.model[number]
        x = torch.linspace(-3, 5, layer.in_features)[None]
        self.check_product(layer, x, layer(x))

    @invariant()
    def computes_with_what_the_masters_are(self):
        if not hasattr(self, "model"):
            return
        x = torch.linspace(-2, 3, self.model[0].in_features)[None]
        inner = []
        hook = self.model[0].register_forward_hook(lambda _, __, y: inner.append(y))
        y = self.model(x)
        hook.remove()
        self.check_product(self.model[0], x, inner[0])
        self.check_product(self.model[1], inner[0], y)
        assert all(torch.equal(self.said(model), said) for model, said in self.copies)

    def check_product(self, layer, x, y):
        want = taken(x, self.scale_format) @ values(layer.weight, self.scale_format).t()
        torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4 * want.abs().max().item() + 1e-30)

    @staticmethod
    def said(model):
        return model(torch.ones(1, model[0].in_features)).detach()


TestTrainer = Trainer.TestCase
