"""Two processes on two GPUs broadcast over NCCL, join, leave, give up: what `test_communicator.py` has on gloo.

Takes half a minute and needs no engine: the first thing to run where a broadcast is new.
"""

import os

import pytest
import torch

from tests.gpu import collective_ranks
from tests.trainer_ranks import TrainerRanks

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # for the processes of the ranks, as in the scripts here
BACKEND = "nccl"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = TrainerRanks(2, str(tmp_path_factory.mktemp("two") / "store"))
    yield ranks
    ranks.close()


def test_what_is_sent_comes_bucket_by_bucket(two):
    (sent, _), (came, bytes_a_second) = two.run(collective_ranks.repeat, BACKEND, 256 << 20)
    print(f"{bytes_a_second / 1e9:.0f} GB/s in buckets of 256 MiB")
    assert came == sent == list(range(1, 13))


def test_who_leaves_for_another_group_waits_for_nobody(two):
    (_, _), (came, slowest_s) = two.run(collective_ranks.alternate, BACKEND)
    assert came == [1, 2, 3, 4]
    assert slowest_s < 2


def test_who_gives_up_ends_what_is_under_way_in_every_section(two):
    (said, seconds), _ = two.run(collective_ranks.give_up, BACKEND)
    assert "no memory" in said
    assert seconds < 5


def test_memory_of_groups_that_were_left_is_given_back(two):
    before = two.run(collective_ranks.free_bytes, BACKEND)
    for _ in range(3):
        two.run(collective_ranks.alternate, BACKEND)
    after = two.run(collective_ranks.free_bytes, BACKEND)
    assert max(was - left for was, left in zip(before, after, strict=True)) < 64 << 20
