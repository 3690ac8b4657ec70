"""Noise on norms: where it is, that it is the same wherever it is made, and what an engine holds after refits with it."""

import copy

import pytest
import torch
from fp8refit_transformers import to_block_fp8
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fp8refit import Refitter
from fp8refit.errors import InvalidOptionError
from fp8refit.sources.row_runs import Piece
from fp8refit.training.noise import NORMS, annealed, noised
from fp8refit.training.peft import merged
from tests.tiny_models import make_model

SIGMA = 0.02
INPUT, FINAL, Q_NORM = (
    "model.layers.0.input_layernorm.weight",
    "model.norm.weight",
    "model.layers.0.self_attn.q_norm.weight",
)

FIRST_TWO = [-0.9511266350746155, -1.3485487699508667]
"""Values of the noise on `FINAL`, by seed 0: on every machine, and in every version to come."""


@pytest.fixture(scope="module")
def policy():
    return {name: tensor.detach() for name, tensor in make_model("qwen3", 1).state_dict().items()}


def test_it_falls_by_one_factor_from_stage_to_stage_after_one_without_any():
    sigmas = [annealed(step, 100, start=1e-2, end=1e-4, num_stages=5) for step in range(120)]
    assert sigmas[:20] == [0.0] * 20
    assert sigmas[20:40] == [pytest.approx(1e-2)] * 20
    assert sigmas[80:] == [pytest.approx(1e-4)] * 40  # also after the end
    assert sigmas[40] / sigmas[20] == pytest.approx(sigmas[60] / sigmas[40]) == pytest.approx(sigmas[80] / sigmas[60])


def test_its_stages_and_values_are_those_of_qerls_own_code():
    """`get_sigma_by_step` of NVlabs/QeRL, with its trend of nine values."""
    trend = [5e-2 * (5e-4 / 5e-2) ** (index / 8) for index in range(9)]
    for step in range(1000):
        interval = int(step // (1000 / 10))
        expected = trend[min(interval - 1, 8)] if interval else 0
        assert annealed(step, 1000, start=5e-2, end=5e-4, num_stages=10) == pytest.approx(expected)


def test_norms_before_attention_and_mlp_and_the_last_one_have_it_and_nothing_else(policy):
    found = noised(policy, SIGMA)
    changed = {name for name in policy if not torch.equal(found[name], policy[name])}
    assert changed == {name for name in policy if "layernorm" in name} | {FINAL}
    assert Q_NORM in policy and INPUT in changed and list(found) == list(policy)
    values = torch.cat([(found[name].float() - policy[name].float()) for name in changed])
    assert values.mean().abs() < 0.1 * SIGMA and values.std() == pytest.approx(SIGMA, rel=0.1)


def test_it_is_rounded_to_the_dtype_and_then_added_in_it(policy):
    exact = noised({INPUT: policy[INPUT].double()}, SIGMA)[INPUT] - policy[INPUT].double()
    assert torch.equal(noised(policy, SIGMA)[INPUT], policy[INPUT] + exact.to(torch.bfloat16))


def test_it_depends_on_seed_and_name_alone(policy):
    assert torch.equal(noised(policy, SIGMA)[FINAL], noised({FINAL: policy[FINAL]}, SIGMA)[FINAL])
    assert torch.equal(noised(policy, SIGMA)[FINAL], dict(noised(iter(policy.items()), SIGMA))[FINAL])
    assert not torch.equal(noised(policy, SIGMA, seed=1)[FINAL], noised(policy, SIGMA)[FINAL])
    ones = {name: torch.ones(64) for name in (INPUT, FINAL)}
    assert not torch.equal(*noised(ones, SIGMA).values())
    assert (noised(ones, 1.0)[FINAL][:2] - 1).tolist() == pytest.approx(FIRST_TWO, abs=1e-6)


def test_no_noise_is_the_same_tensors(policy):
    assert all(noised(policy, 0.0)[name] is tensor for name, tensor in policy.items())


@pytest.mark.parametrize("sigma", [-1.0, float("nan"), float("inf")])
def test_a_sigma_that_is_none_is_refused(sigma, policy):
    with pytest.raises(InvalidOptionError, match="pass a standard deviation"):
        noised(policy, sigma)


@pytest.mark.parametrize(
    "options", [{"num_stages": 2}, {"start": 0.0}, {"end": -1.0}, {"num_steps": 0}, {"step": -1}], ids=str
)
def test_stages_that_are_none_are_refused(options):
    with pytest.raises(InvalidOptionError, match="at least three stages"):
        annealed(**{"step": 1, "num_steps": 10, **options})


def test_a_policy_without_such_norms_is_refused():
    with pytest.raises(InvalidOptionError, match=r"no tensor is called like \*_layernorm.weight"):
        noised({"transformer.h.0.ln_1.weight": torch.ones(4)}, SIGMA)
    assert noised({"h.ln_1.weight": torch.ones(4)}, SIGMA, names=["*.ln_1.weight"])


def test_every_rank_adds_its_part_of_the_same_noise(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = torch.ones(64)
        found = noised({FINAL: distribute_tensor(weight, mesh, [Shard(0)])}, SIGMA)[FINAL]
        assert isinstance(found, DTensor) and found.placements == (Shard(0),)
        assert torch.equal(found.to_local(), noised({FINAL: weight}, SIGMA)[FINAL])
    finally:
        torch.distributed.destroy_process_group()


def test_an_engine_serves_the_noise_of_one_step_and_none_after_it(policy):
    engine = to_block_fp8(make_model("qwen3", 2))
    refitter = Refitter(engine)
    refitter.refit(policy)
    plain = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    for step in (1, 2):
        given = noised(policy, SIGMA, seed=step)
        refitter.refit(given)
        assert refitter.verify(noised(policy, SIGMA, seed=step))
        held = engine.state_dict()
        assert {name for name in plain if not torch.equal(held[name], plain[name])} == {
            name for name in plain if "layernorm" in name or name == FINAL
        }
        assert torch.equal(held[INPUT], given[INPUT])
    refitter.refit(policy)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in engine.state_dict().items())


def test_norms_alone_are_enough_beside_weights_that_are_kept(policy):
    engine = to_block_fp8(make_model("qwen3", 2))
    Refitter(engine).refit(policy)
    norms = {name: tensor for name, tensor in policy.items() if "layernorm" in name or name == FINAL}
    Refitter(engine, keep=["*"]).refit(noised(norms, SIGMA))
    other = to_block_fp8(make_model("qwen3", 3))
    Refitter(other).refit(noised(policy, SIGMA))
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in engine.state_dict().items())


def test_merged_adapters_keep_their_products_and_get_noise_beside_them():
    peft = pytest.importorskip("peft")
    base = make_model("qwen3", 1)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    source, plain = noised(merged(model), SIGMA, seed=4), dict(merged(model))
    expected = noised(plain, SIGMA, seed=4)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in source)
    assert torch.equal(source.pick([FINAL])[FINAL], expected[FINAL])
    assert sum(not isinstance(each, Piece) for each in source.recipes(1 << 20)) == 4
    for piece in source.pieces(1 << 20):
        if piece.is_whole:
            assert torch.equal(piece.tensor, expected[piece.name])
    engine = to_block_fp8(copy.deepcopy(make_model("qwen3", 2)))
    refitter = Refitter(engine)
    refitter.refit(source)
    assert refitter.verify(expected)
    with pytest.raises(InvalidOptionError, match=r"q_proj.weight is no vector, and adapters may be merged into it"):
        noised(merged(model), SIGMA, names=["*q_proj.weight"])
    with pytest.raises(InvalidOptionError, match="no tensor is called like"):
        noised(merged(model), SIGMA, names=["nothing"])


def test_its_names_are_those_of_the_norms_that_qerl_adds_it_to():
    """Modules of class Qwen2RMSNorm: in Qwen2 these are the norms of layers, and the last one."""
    model = make_model("qwen2", 1)
    norms = {f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Qwen2RMSNorm"}
    found = noised(model.state_dict(), SIGMA, names=NORMS)
    assert {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, found[name])} == norms
