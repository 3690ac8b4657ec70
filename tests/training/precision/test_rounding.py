"""Norms and rotary embeddings that round once, as an engine's kernels do."""

import pytest
import torch
from torch.nn import functional

from fp8refit.training import precision
from fp8refit.training.precision.rounding import round_once
from tests.training.precision.models import IDS, layout_of, make_trainer, slot


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return (x.float() * cos.float() + torch.cat([-second, first], -1).float() * sin.float()).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_is_rounded_once(dtype):
    model = make_trainer("qwen3", torch.bfloat16)
    norm = model.model.norm
    x = torch.randn(64, norm.weight.shape[0], generator=torch.Generator().manual_seed(0)).to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    before = norm(x)
    round_once(model)
    wide = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    expected = wide * norm.weight.double()
    assert norm(x).dtype is dtype
    assert (norm(x) != expected.to(dtype)).float().mean() < (1e-3 if dtype is torch.bfloat16 else 1)
    assert torch.allclose(norm(x).double(), expected, rtol=2**-8 if dtype is torch.bfloat16 else 1e-6)
    assert (before != expected.to(dtype)).float().mean() > 0.1


def test_rotary_embeddings_are_rounded_once_in_this_model_alone(monkeypatch):
    came = []
    multiply = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda q, *args, **kw: came.append(q) or multiply(q, *args, **kw)
    )
    model, other = make_trainer("qwen3", torch.bfloat16), make_trainer("qwen3", torch.bfloat16)
    round_once(model)
    normed = []
    for each in (model, other):
        each.model.layers[0].self_attn.q_norm.register_forward_hook(lambda _, __, out: normed.append(out))
        with torch.no_grad():
            each(input_ids=IDS)
    layers = model.config.num_hidden_layers
    cos, sin = model.model.rotary_emb(normed[0], torch.arange(IDS.shape[1])[None])
    for place, is_equal in ((0, True), (1, False)):
        expected = rotated(normed[place].transpose(1, 2), cos[:, None], sin[:, None])
        assert torch.equal(came[place * layers], expected) is is_equal


@pytest.mark.parametrize("rounds_once", [True, False])
def test_a_model_follows_the_engine_it_is_unified_with(rounds_once):
    model, plain = make_trainer("qwen3", torch.bfloat16), make_trainer("qwen3", torch.bfloat16)
    slots = [slot(name, tensor.shape) for name, tensor in plain.state_dict().items()]
    precision.unify(model, like=layout_of(slots, rounds_once=rounds_once))
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits) is not rounds_once
