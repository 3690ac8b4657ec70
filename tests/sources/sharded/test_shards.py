"""Who holds which box of a tensor, and how tensors are cut into batches."""

import pytest
import torch

from fp8refit.live.slots import TensorMeta
from fp8refit.sources.row_runs import row_ranges
from fp8refit.sources.sharded.batches import Bucket, batches
from fp8refit.sources.sharded.shards import Box, Part, ShardLayout, Stage


def test_chunks_are_rounded_up_and_the_last_ranks_hold_less():
    layout = ShardLayout(shape=(10, 6), mesh_shape=(4,), stages=(Stage(axis=0, dim=0),))
    boxes = [layout.box((rank,), 1) for rank in range(4)]
    assert [(box.start[0], box.shape) for box in boxes] == [(0, (3, 6)), (3, (3, 6)), (6, (3, 6)), (9, (1, 6))]
    assert [layout.padded((rank,), 0) for rank in range(4)] == [(3, 6)] * 4
    assert layout.num_padded == 12 * 6


def test_what_is_cut_twice_is_cut_in_the_order_of_the_mesh():
    layout = ShardLayout(shape=(10, 6), mesh_shape=(2, 3), stages=(Stage(axis=0, dim=0), Stage(axis=1, dim=0)))
    starts = [layout.box((outer, inner), 2).start[0] for outer in range(2) for inner in range(3)]
    assert starts == [0, 2, 4, 5, 7, 9]
    assert layout.box((1, 2), 0) == Box(start=(0, 0), shape=(10, 6))


def test_ranks_may_hold_nothing():
    layout = ShardLayout(shape=(2, 6), mesh_shape=(4,), stages=(Stage(axis=0, dim=0),))
    assert [layout.box((rank,), 1).shape[0] for rank in range(4)] == [1, 1, 0, 0]
    assert layout.box((3,), 1).rows(0, 2)[1] == 0


@pytest.mark.parametrize(
    ("shape", "max_bytes", "expected"),
    [
        ((300, 10), 10**6, [(0, 300)]),
        ((300, 10), 300 * 40, [(0, 300)]),
        ((300, 10), 299 * 40, [(0, 256), (256, 44)]),
        ((300, 10), 1, [(0, 128), (128, 128), (256, 44)]),
        ((3, 300, 10), 1, [(0, 1), (1, 1), (2, 1)]),
        ((), 1, [(0, 1)]),
    ],
)
def test_pieces_begin_at_blocks_and_hold_one_at_least(shape, max_bytes, expected):
    assert list(row_ranges(TensorMeta(shape=shape, dtype=torch.float32), max_bytes)) == expected


def test_what_needs_no_gather_takes_no_room_in_a_bucket():
    plain = [
        Part(name=str(n), meta=TensorMeta.of(torch.ones(9)), local=torch.ones(9), placed="whole") for n in range(5)
    ]
    (bucket,) = batches(plain, max_bytes=1)
    assert isinstance(bucket, Bucket)
    bucket.allocate()
    bucket.begin()
    bucket.finish(timeout_s=1)
    assert [part.name for part, _, _ in bucket.tensors()] == ["0", "1", "2", "3", "4"]
