"""However a trained weight changes, the next forward pass computes with its new codes, and they are served."""

import copy

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8refit import quantize_blockwise
from fp8refit.training import precision
from tests.training.precision.changes import OPTIMIZERS, WHOLE_CHANGES, linears
from tests.training.precision.models import layout_of, slot

X = torch.linspace(-2, 3, 3 * 256).view(3, 256)


def make_model(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    part = nn.Sequential(nn.Linear(256, 130, bias=False), nn.Linear(130, 256, bias=False))
    return nn.Sequential(part, nn.Linear(256, 24, bias=False)).to(dtype)


def unify(model, scale_format="fp32"):
    slots = [slot(name, tensor.shape, scale_format) for name, tensor in model.state_dict().items()]
    return precision.unify(model, like=layout_of(slots))


def used_by(model, call):
    """Codes and scales with which every linear computes in `call`."""
    found = {}
    hooks = [
        layer.register_forward_hook(
            lambda layer, *_: found.update(
                {layer: (layer.trained_weight.codes.clone(), layer.trained_weight.scale.clone())}
            )
        )
        for layer in linears(model)
    ]
    call()
    for hook in hooks:
        hook.remove()
    return found


def assert_are_of_the_masters(found):
    assert found
    for layer, (codes, scale) in found.items():
        want_codes, want_scale = quantize_blockwise(layer.weight.detach().bfloat16())
        assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))
        assert torch.equal(scale, want_scale)


def loss_of(model):
    return model(X.to(next(model.parameters()).dtype)).float().square().mean()


WAYS = {
    "whole": loss_of,
    "without gradients": torch.no_grad()(loss_of),
    "in inference": torch.inference_mode()(loss_of),
    "a part": lambda model: model[0](X.to(model[1].weight.dtype)),
    "a linear": lambda model: model[1](X.to(model[1].weight.dtype)),
    "its forward alone": lambda model: model.forward(X.to(model[1].weight.dtype)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", WHOLE_CHANGES)
def test_the_next_forward_pass_computes_with_what_changed(change, way):
    model = make_model()
    unified = unify(model)
    WAYS[way](model)
    before = {name: tensor.clone() for name, tensor in unified.served().items()}
    WHOLE_CHANGES[change](model)
    assert_are_of_the_masters(used_by(model, lambda: WAYS[way](model)))
    served = unified.served()
    assert any(not torch.equal(served[name].view(torch.uint8), before[name].view(torch.uint8)) for name in served)
    for name, weight in model.state_dict().items():
        codes, scale = quantize_blockwise(weight.bfloat16())
        assert torch.equal(served[name].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(served[f"{name}_scale_inv"], scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_those_of_a_trainer_that_is_made_anew_before_each(optimizer, dtype):
    kind, options = OPTIMIZERS[optimizer]
    model = make_model(dtype)
    plain = copy.deepcopy(model)
    unify(model)
    lr = 1.0 if kind is torch.optim.SGD else 3e-2
    ours, theirs = (kind(one.parameters(), lr=lr, **options) for one in (model, plain))
    losses = []
    for _ in range(4):
        for _ in range(2):  # micro-batches
            fresh = copy.deepcopy(plain)
            unify(fresh)
            loss, other = loss_of(model), loss_of(fresh)
            loss.backward()
            other.backward()
            for held, made in zip(plain.parameters(), fresh.parameters(), strict=True):
                held.grad = made.grad if held.grad is None else held.grad + made.grad
            losses.append((loss.item(), other.item()))
        for one in (ours, theirs):
            one.step()
            one.zero_grad()
    assert all(loss == other for loss, other in losses), losses
    does_nothing = optimizer == "SGD fused" and dtype is torch.bfloat16  # in torch 2.13, on a CPU
    assert does_nothing or losses[0][0] != losses[2][0]


def test_a_step_within_the_backward_pass_is_seen_and_recomputation_takes_the_same_codes():
    """As optimizers that free each gradient do; each layer is recomputed with the codes that it had."""
    model = make_model()
    unify(model)
    optimizers = {weight: torch.optim.AdamW([weight], lr=3e-2, fused=True) for weight in model.parameters()}

    def step(weight):
        optimizers[weight].step()
        weight.grad = None

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(step)
    used = []
    for layer in linears(model):
        layer.register_forward_hook(lambda layer, *_: used.append(layer.trained_weight.codes.view(torch.uint8).clone()))
    for reentrant in (False, True, False):
        used.clear()
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant).square().mean().backward()
        first, again = used[:3], used[3:]
        assert len(again) >= 2  # the last is not needed
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=False))
        assert_are_of_the_masters(used_by(model, lambda: loss_of(model).detach()))
        assert not torch.equal(first[0], used[-3])


def test_weights_that_change_between_forward_and_backward_are_not_recomputed_with_others():
    gradients = []
    for is_changed in (False, True):
        model = make_model()
        unify(model)
        x = X.clone().requires_grad_()
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        if is_changed:
            WHOLE_CHANGES["multiply_data"](model)
        loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_backward_pass_of_an_older_step_is_refused():
    model = make_model()
    unified = unify(model)
    one, other = loss_of(model), loss_of(model)
    unified.served()
    (one + other).backward()  # nothing has changed
    old = loss_of(model)
    WHOLE_CHANGES["multiply_data"](model)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_only_what_changed_is_counted():
    model = make_model()
    unified = unify(model)
    assert unified.refresh() == 3
    model[0][1].weight.data.mul_(2)
    assert unified.refresh() == 1
    assert unified.refresh() == 0


def test_an_interrupt_does_not_hide_what_changes_later():
    model = make_model()
    unify(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    for way in ("whole", "a part"):
        hook = model[0][1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            WAYS[way](model)
        hook.remove()
        WHOLE_CHANGES["multiply_data"](model)
        assert_are_of_the_masters(used_by(model, lambda way=way: WAYS[way](model)))


@pytest.mark.parametrize("optimizer", ["AdamW fused", "SGD plain"])
def test_a_compiled_part_sees_steps(optimizer):
    kind, options = OPTIMIZERS[optimizer]
    model = make_model()
    unify(model)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    torch._dynamo.reset()
    part = torch.compile(model[0], backend="aot_eager")
    for _ in range(3):
        y = part(X)
        assert torch.equal(y, copy.deepcopy(model)[0](X))
        y.square().mean().backward()
        optimizer.step()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(128, 128, bias=False))

    def forward(self, x):
        return x + self.mlp(x)


def test_compiled_layers_share_what_is_compiled():
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(12)))
    unify(model)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    for layer in model:
        layer.compile(backend=counter)
    for _ in range(2):
        model(torch.ones(3, 128)).sum().backward()
    assert counter.frame_count <= 3


def test_a_compiled_part_without_breaks_is_refused_until_what_changed_is_quantized():
    model = make_model()
    unified = unify(model)
    torch._dynamo.reset()
    torch.compiler.set_stance("default")
    part = torch.compile(model[0], backend="aot_eager", fullgraph=True)
    for _ in range(3):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="before_forward"):
            part(X)
        unified.refresh()
        y = part(X)
        assert torch.equal(y, copy.deepcopy(model)[0](X))
        y.square().mean().backward()
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def test_a_copy_sees_steps_of_its_own():
    model = make_model()
    unify(model)
    other = copy.deepcopy(model)
    for one in (model, other):
        loss_of(one).backward()
        torch.optim.AdamW(one.parameters(), lr=0.1, fused=True).step()
        assert one[1].trained_weight.owner.is_due
        assert_are_of_the_masters(used_by(one, lambda one=one: loss_of(one)))
