"""A trainer that FSDP2 shards over two ranks, in any order of what trainers do, against a plain quantizer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_ranks import TrainerRanks
from tests.training.precision import ranks
from tests.training.precision.changes import CHANGES, SHARDED_OPTIMIZERS

ACTIONS = [*CHANGES, "train", "step", "step", "serve", "one rank writes", "nothing"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    group = TrainerRanks(2, str(tmp_path_factory.mktemp("two") / "store"))
    yield group
    group.close()


@given(
    seed=st.integers(0, 1 << 16),
    layout=st.sampled_from([*ranks.LAYOUTS]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale_format=st.sampled_from(["fp32", "ue8m0"]),
    optimizer=st.sampled_from(SHARDED_OPTIMIZERS),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=8),
)
def test_every_pass_computes_with_what_the_masters_are(two, seed, layout, dtype, scale_format, optimizer, actions):
    assert two.run(ranks.do_sharded, seed, layout, dtype, scale_format, optimizer, actions) == [[]] * 2
