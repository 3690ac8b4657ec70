"""FSDP2 on two and on four gloo ranks, each a process: what is gathered are codes, and they are the engine's."""

import pytest
import torch

from tests.precision import ranks
from tests.trainer_ranks import TrainerRanks


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


@pytest.mark.parametrize(
    ("dtype", "scale_format", "compiles"), [(torch.float32, "ue8m0", False), (torch.bfloat16, "fp32", True)], ids=str
)
def test_trainer_and_engine_hold_the_same_bytes_and_say_the_same(two, dtype, scale_format, compiles):
    assert two.run(ranks.train_sharded, (2,), dtype, scale_format, compiles) == [[]] * 2


def test_replicas_of_shards_do_the_same(four):
    assert four.run(ranks.train_sharded, (2, 2), torch.float32, "fp32", False) == [[]] * 4


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_blocks_that_ranks_share_are_quantized_as_one(two, four, scale_format):
    assert two.run(ranks.quantize_unaligned, scale_format) == [[]] * 2
    assert four.run(ranks.quantize_unaligned, scale_format) == [[]] * 4


def test_experts_are_shared_out(two):
    assert two.run(ranks.train_experts, "fp32") == [[]] * 2


def test_sharding_may_come_later(two):
    assert two.run(ranks.shard_after) == [True] * 2


def test_nan_of_one_rank_is_told_on_all(two):
    assert two.run(ranks.meet_nan) == [("NonFiniteError", ("model.layers.1.mlp.up_proj.weight",))] * 2
