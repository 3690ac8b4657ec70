"""A trainer that shares its precision with an engine: bytes, logits, once per step, and what is refused."""

import copy

import pytest
import torch
from fp8refit_transformers import to_block_fp8
from torch import nn

from fp8refit import NonFiniteError, PrecisionError, Refitter, quantize_blockwise
from fp8refit.kernels import Action
from fp8refit.live.formats import FLOAT_SCALES
from fp8refit.training import correction, precision
from tests.tiny_models import make_model
from tests.training.precision.models import IDS, layout_of, loss_of, make_trainer, moe_layout, slot

FORMATS = FLOAT_SCALES


def make_refitter(scale_format="fp32", family="qwen3"):
    engine = to_block_fp8(make_model(family, 1), scale_format=scale_format)
    return engine, Refitter(engine)


def train(model, *, steps=1, lr=1e-3, call=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        loss = loss_of(model if call is None else call)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def assert_is_quantized(tensors, masters, scale_format):
    """Codes and scales of `tensors` are those of the masters, matrix by matrix."""
    for name, master in masters.items():
        matrices = master.detach().bfloat16().view(-1, *master.shape[-2:])
        expected = [quantize_blockwise(matrix, scale_format=scale_format) for matrix in matrices]
        codes = torch.stack([codes for codes, _ in expected]).view_as(master)
        assert torch.equal(tensors[name].view(torch.uint8), codes.view(torch.uint8)), name
        assert torch.equal(
            tensors[f"{name}_scale_inv"].flatten(), torch.cat([scale.flatten() for _, scale in expected])
        ), name


def quantized(model):
    return {name: held for name, held in model.state_dict().items() if "_proj" in name and not name.endswith("bias")}


def said(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits.float().log_softmax(-1)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trainer_and_engine_hold_the_same_bytes_and_say_the_same(scale_format, family, dtype):
    engine, refitter = make_refitter(scale_format, family)
    model = make_trainer(family, dtype)
    unified = precision.unify(model, like=refitter.layout())
    for _ in range(3):
        train(model, lr=1e-2)
        served = unified.served()
        report = refitter.refit(served)
        assert report.num_quantized == 0 and "quantized             0" in str(report)
        assert_is_quantized(served, quantized(model), scale_format)
        live = dict(engine.state_dict())
        for name in served:
            assert torch.equal(live[name].view(torch.uint8), served[name].to(live[name].dtype).view(torch.uint8)), name
        for weight in unified._weights.weights:
            assert torch.equal(weight.codes.view(torch.uint8), live[weight.name].view(torch.uint8)), weight.name
        assert torch.equal(said(model), said(engine))


def test_a_refit_of_master_weights_says_that_it_quantized():
    _, refitter = make_refitter()
    model = make_trainer()
    assert refitter.refit(model.state_dict()).num_quantized == len(quantized(model)) == 14


def test_the_mismatch_of_a_bf16_trainer_is_gone():
    engine, refitter = make_refitter()
    plain, model = make_trainer(dtype=torch.bfloat16), make_trainer()
    unified = precision.unify(model, like=refitter.layout())
    refitter.refit(unified.served())
    tokens = said(engine).argmax(-1, keepdim=True)
    k3 = [
        correction.mismatch(
            said(trainer).gather(-1, tokens)[..., 0],
            said(engine).gather(-1, tokens)[..., 0],
            torch.ones_like(IDS).bool(),
        ).k3
        for trainer in (plain, model)
    ]
    assert k3[0] > 1e-3 and k3[1] == 0


def test_codes_are_computed_once_a_step():
    _, refitter = make_refitter()
    model = make_trainer()
    unified = precision.unify(model, like=refitter.layout())
    assert unified.refresh() == 14
    ((_, table, _),) = unified._weights._tables.values()
    launches, launch = [], table.launch
    table.launch = lambda *, check, action=Action.WRITE: (
        launches.extend([action] * (action is Action.WRITE)),
        launch(check=check, action=action),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 4):
        for _ in range(3):
            loss_of(model).backward()
        assert len(launches) == step - 1
        optimizer.step()
        assert unified.refresh() == 14 and unified.refresh() == 0
    assert len(launches) == 3


def test_a_part_of_a_model_notices_that_its_weights_were_written():
    _, refitter = make_refitter()
    model = make_trainer()
    unified = precision.unify(model, like=refitter.layout())
    unified.refresh()
    linear = model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        linear.weight.mul_(3)
    x = torch.randn(4, 256)
    y = linear(x)
    fresh = copy.deepcopy(model)
    assert torch.equal(y, fresh.model.layers[0].mlp.up_proj(x))
    assert unified.refresh() == 0


def test_what_is_served_is_what_the_masters_are_even_if_nothing_tells_that_they_were_written():
    _, refitter = make_refitter()
    model = make_trainer()
    unified = precision.unify(model, like=refitter.layout())
    unified.served()
    for parameter in model.parameters():
        parameter.data.mul_(-1.5)
    assert_is_quantized(unified.served(), quantized(model), "fp32")


def test_it_saves_and_loads_as_the_plain_model_does(tmp_path):
    _, refitter = make_refitter()
    model, plain = make_trainer(), make_trainer()
    before = dict(model.named_parameters())
    unified = precision.unify(model, like=refitter.layout())
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(held, plain.state_dict()[name]) for name, held in model.state_dict().items())
    model.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    assert all(torch.equal(held, plain.state_dict()[name]) for name, held in again.state_dict().items())
    said(model)
    other = make_trainer(seed=5)
    model.load_state_dict(other.state_dict())
    unified_other = precision.unify(other, like=refitter.layout())
    assert torch.equal(said(model), said(other))
    assert_is_quantized(unified.served(), quantized(other), "fp32")
    assert_is_quantized(unified_other.served(), quantized(other), "fp32")


def test_a_copy_of_a_model_has_codes_of_its_own():
    _, refitter = make_refitter()
    model = make_trainer()
    precision.unify(model, like=refitter.layout())
    before = said(model)
    other = copy.deepcopy(model)
    train(other, lr=1e-1)
    assert not torch.equal(said(other), before)
    assert torch.equal(said(model), before)


@pytest.mark.parametrize("how", ["whole", "blocks", "checkpointing"])
@pytest.mark.parametrize("rounds_once", [False, True])
def test_compiled_and_checkpointed_models_do_the_same(how, rounds_once):
    _, refitter = make_refitter()
    layout = refitter.layout().model_copy(update={"rounds_once": rounds_once})
    results = []
    for is_plain in (True, False):
        model, call = make_trainer(), None
        model.train()
        unified = precision.unify(model, like=layout)
        if not is_plain and how == "whole":
            call = torch.compile(model, backend="aot_eager")
        if not is_plain and how == "blocks":
            for layer in model.model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
        if not is_plain and how == "checkpointing":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        loss = train(model, steps=3, call=call)
        results.append((loss, unified.served()))
    (loss, served), (other_loss, other_served) = results
    assert loss == other_loss
    assert all(torch.equal(served[name].view(torch.uint8), other_served[name].view(torch.uint8)) for name in served)


def test_steps_of_training_lower_the_loss():
    _, refitter = make_refitter("ue8m0")
    model = make_trainer()
    precision.unify(model, like=refitter.layout())
    assert train(model, steps=20) < 0.5 * train(make_trainer(), steps=1)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_experts_are_served_as_the_stacks_that_engines_take(scale_format):
    model = make_trainer("qwen3_moe")
    unified = precision.unify(model, like=moe_layout(model, scale_format))
    train(model, steps=2)
    assert_is_quantized(unified.served(), quantized(model), scale_format)
    assert len(unified._weights.weights) == 2 * (4 + 2)


def test_nan_is_named_and_codes_stay_stale():
    _, refitter = make_refitter()
    model = make_trainer()
    unified = precision.unify(model, like=refitter.layout())
    unified.refresh()
    name = "model.layers.1.self_attn.k_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[3, 5] = torch.nan
    for call in (unified.refresh, unified.served, lambda: said(model)):
        with pytest.raises(NonFiniteError) as raised:
            call()
        assert raised.value.names == (name,)


class Own(nn.Linear):
    """A linear that does something else."""

    def forward(self, x):
        return super().forward(x) * 2


def pair(linear=nn.Linear):
    model = nn.Module()
    model.a, model.b = linear(256, 128, bias=False), nn.Linear(128, 128, bias=False)
    return model


A, B = slot("a.weight", (128, 256), "fp32"), slot("b.weight", (128, 128), "fp32")
REFUSED = {
    "absent from the engine": (pair, [A], {}, "b.weight: this engine has no such weight"),
    "absent from the model": (
        pair,
        [A, B, slot("c.weight", (1, 1))],
        {},
        "c.weight: is in this engine but not in the model",
    ),
    "another shape": (
        pair,
        [A, slot("b.weight", (128, 256), "fp32")],
        {},
        "b.weight: has shape [128, 128], but [128, 256] in this engine",
    ),
    "two formats": (
        pair,
        [A, slot("a.weight", (128, 256), "ue8m0"), B],
        {},
        "a.weight: slots of this engine hold it in different formats",
    ),
    "off the grid": (
        pair,
        [slot("a.weight", (128, 256), "fp32", shape=(64, 256), offset=(64, 0)), B],
        {},
        "a.weight: a rank of this engine begins at [64, 0]",
    ),
    "an order of its own": (
        pair,
        [slot("a.weight", (128, 256), is_rearranged=True), B],
        {},
        "a.weight: this engine holds it",
    ),
    "another forward": (
        lambda: pair(Own),
        [A, B],
        {},
        "a.weight: this engine holds it as block FP8, but Own is neither",
    ),
    "refusals": (
        pair,
        [A, B],
        {"refusals": ("a: its kernel repacks",)},
        "the engine cannot be refitted: a: its kernel repacks",
    ),
    "no master": (lambda: pair().to(torch.float64), [A, B], {}, "a.weight: is torch.float64; master weights are"),
}


@pytest.mark.parametrize(("make", "slots", "fields", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_unified_is_refused_by_name_and_nothing_is_changed(make, slots, fields, problem):
    model = make()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(PrecisionError) as raised:
        precision.unify(model, like=layout_of(slots, **fields))
    assert any(line.startswith(problem) for line in raised.value.problems), raised.value.problems
    assert [type(module) for module in model.modules()] == kinds
    assert not model._forward_pre_hooks


def test_every_problem_is_told_at_once():
    with pytest.raises(PrecisionError) as raised:
        precision.unify(pair(), like=layout_of([]))
    assert len(raised.value.problems) == 2


def test_weights_that_engines_do_not_quantize_are_seen_in_the_engines_dtype():
    model = nn.Sequential(nn.Embedding(8, 16), nn.LayerNorm(16), nn.Linear(16, 4, bias=False)).float()
    names = dict.fromkeys(("0.weight", "1.weight", "1.bias"), "bfloat16") | {"2.weight": "float32"}
    masters = dict(model.named_parameters())
    precision.unify(
        model, like=layout_of([slot(name, masters[name].shape, dtype=dtype) for name, dtype in names.items()])
    )
    assert torch.equal(model[0].weight, masters["0.weight"].bfloat16())
    assert model[1].bias.dtype is torch.bfloat16 and model[2].weight is masters["2.weight"]
    model[0](torch.tensor([3])).float().sum().backward()
    assert masters["0.weight"].grad.dtype is torch.float32 and torch.equal(masters["0.weight"].grad[3], torch.ones(16))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_engine_for_its_layout_and_a_second_call_are_refused(family):
    model, (engine, refitter) = make_trainer(family), make_refitter(family=family)
    for wrong in (engine, refitter, None):
        with pytest.raises(PrecisionError, match=f"like: is of type {type(wrong).__name__}; pass refitter.layout"):
            precision.unify(model, like=wrong)
    unified = precision.unify(model, like=refitter.layout())
    loss = loss_of(model)
    with pytest.raises(PrecisionError, match="model: is unified already; use the handle"):
        precision.unify(model, like=refitter.layout())
    assert torch.equal(loss_of(model), loss)
    refitter.refit(unified.served())
