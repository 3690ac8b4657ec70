"""Sharded state dicts on two GPUs, over NCCL: what `tests/sources/sharded/test_gather.py` holds over gloo."""

import os

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests import sharded
from tests.trainer_ranks import TrainerRanks

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # for the processes of the ranks, as in the scripts here
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = TrainerRanks(2, str(tmp_path_factory.mktemp("two") / "store"), backend="nccl")
    yield ranks
    ranks.close()


@pytest.mark.parametrize("max_bytes", [1 << 20, 5000])
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((2,), (Shard(0),)), ((2,), (Shard(1),)), ((2,), (Replicate(),)), ((1, 2), (Replicate(), Shard(0)))],
    ids=str,
)
def test_what_is_gathered_is_the_model(two, mesh, placements, max_bytes):
    assert two.run(sharded.gather_all, mesh, placements, max_bytes) == [[]] * 2


@pytest.mark.parametrize("placements", [(Shard(0),), (Shard(1),)], ids=str)
def test_the_next_batch_is_on_its_way_while_one_is_read(two, placements, tmp_path):
    sharded.assert_overlap(*two.run(sharded.read_slowly, placements, str(tmp_path / "store")))


def test_a_reader_that_stops_lets_the_other_go(two):
    own, other = two.run(sharded.read_partly, "raise")
    assert own == "ValueError: a reader of its own"
    assert other == "RankFailedError: rank 0: ValueError: a reader of its own"
