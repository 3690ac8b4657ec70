"""Sharded state dicts on two and four gloo ranks, each a process."""

import pytest
from torch.distributed.tensor import Replicate, Shard

from tests import sharded
from tests.trainer_ranks import TrainerRanks


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = TrainerRanks(2, str(tmp_path_factory.mktemp("two") / "store"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    ranks = TrainerRanks(4, str(tmp_path_factory.mktemp("four") / "store"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("max_bytes", [1 << 20, 8192, 2000])
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((4,), (Shard(0),)),
        ((4,), (Shard(1),)),
        ((4,), (Replicate(),)),
        ((2, 2), (Replicate(), Shard(0))),
        ((2, 2), (Shard(0), Replicate())),
        ((2, 2), (Replicate(), Shard(1))),
        ((2, 2), (Shard(0), Shard(1))),
        ((2, 2), (Shard(1), Shard(0))),
        ((2, 2), (Shard(0), Shard(0))),
        ((1, 2, 2), (Shard(0), Shard(2), Shard(0))),
    ],
    ids=str,
)
def test_what_is_gathered_is_the_model(four, mesh, placements, max_bytes):
    assert four.run(sharded.gather_all, mesh, placements, max_bytes) == [[]] * 4
