"""FSDP2 on two and on four gloo ranks, each a process: what is gathered are codes, and they are the engine's."""

import pytest
import torch

from tests.trainer_ranks import TrainerRanks
from tests.training.precision import ranks
from tests.training.precision.changes import SHARDED_OPTIMIZERS


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    group = TrainerRanks(2, str(tmp_path_factory.mktemp("two") / "store"))
    yield group
    group.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    group = TrainerRanks(4, str(tmp_path_factory.mktemp("four") / "store"))
    yield group
    group.close()


@pytest.mark.parametrize(("dtype", "scale_format"), [(torch.float32, "ue8m0"), (torch.bfloat16, "fp32")], ids=str)
def test_trainer_and_engine_hold_the_same_bytes_and_say_the_same(two, dtype, scale_format):
    assert two.run(ranks.train_sharded, dtype, scale_format) == [[]] * 2


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_blocks_that_ranks_share_are_quantized_as_one(two, scale_format):
    assert two.run(ranks.quantize_unaligned, (2,), scale_format) == [[]] * 2


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["shards", "replicas of shards"])
def test_blocks_of_four_ranks_are_quantized_as_one(four, shape):
    assert four.run(ranks.quantize_unaligned, shape, "ue8m0") == [[]] * 4


def test_compiled_layers_do_the_same(two):
    assert two.run(ranks.compile_sharded) == [[]] * 2


def test_experts_are_shared_out(two):
    assert two.run(ranks.train_experts, "fp32") == [[]] * 2


def test_norms_and_rotary_embeddings_round_once(two):
    assert two.run(ranks.round_once_sharded) == [True, True]


def test_sharding_comes_first(two):
    problem = "fully_shard was called after unify; call it before, on the plain model"
    assert two.run(ranks.shard_after) == [(problem,)] * 2


def test_nan_of_one_rank_is_told_on_all(two):
    assert two.run(ranks.meet_nan) == [("NonFiniteError", ("0.weight",))] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ranks.LAYOUTS)
def test_the_next_forward_pass_computes_with_what_changed(two, layout, dtype):
    assert two.run(ranks.change_sharded, layout, dtype) == [[]] * 2


@pytest.mark.parametrize("optimizer", SHARDED_OPTIMIZERS)
def test_steps_are_those_of_a_trainer_that_quantizes_before_each_pass(two, optimizer):
    assert two.run(ranks.step_sharded, optimizer) == [[]] * 2


@pytest.mark.parametrize("optimizer", ["AdamW fused", "SGD plain"])
def test_trainers_in_parallel_see_their_steps(two, optimizer):
    assert two.run(ranks.train_in_parallel, optimizer) == [[]] * 2


def test_what_one_rank_writes_is_seen_by_all(two):
    assert two.run(ranks.change_one_rank) == [[]] * 2


def test_recomputation_takes_the_codes_of_the_first_pass(two):
    assert two.run(ranks.recompute_sharded) == [[]] * 2


def test_what_is_not_gathered_is_refused_by_name(two):
    problem = "1.weight: is not gathered; call the module that fully_shard was called with"
    assert two.run(ranks.call_what_is_not_gathered) == [(problem,)] * 2
