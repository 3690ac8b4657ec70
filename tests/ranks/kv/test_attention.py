"""Attention over packed sequences against the formula in float64, one sequence at a time."""

import pytest
import torch
from torch import Tensor

from fp8refit.ranks.kv import attention
from fp8refit.ranks.kv.attention import PackedSequences

CPU = torch.device("cpu")
LENGTHS = {
    "mixed": [5, 1, 40, 38, 1, 7, 64, 33],
    "one": [50],
    "one token": [1],
    "equal": [16, 16, 16],
    "equal, apart": [16, 3, 16, 3, 16],
    "padded": [12, 13, 12, 11],
    "padded, sorted": [13, 12, 12, 11],
    "with empty ones": [0, 9, 0, 9, 4, 0],
}
RULES = [
    {},
    {"window": 1},
    {"window": 6},
    {"window": 12},
    {"window": 64},
    {"soft_cap": 0.7},
    {"window": 6, "soft_cap": 0.7},
]


def tokens_of(num_tokens: int, num_heads: int = 4, num_kv_heads: int = 2, head: int = 16, value: int = 16, dtype=None):
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, num_heads, head), (num_tokens, num_kv_heads, head), (num_tokens, num_kv_heads, value)]
    return tuple(2 * torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def naive(lengths, q, k, v, *, scale, window=None, soft_cap=None) -> Tensor:
    """One sequence, one head and one token at a time, in float64."""
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=torch.float64)
    queries_a_head = q.shape[1] // k.shape[1]
    start = 0
    for length in lengths:
        for head in range(q.shape[1]):
            for i in range(start, start + length):
                first = start if window is None else max(start, i - window + 1)
                keys, values = (x[first : i + 1, head // queries_a_head].double() for x in (k, v))
                scores = keys @ q[i, head].double() * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                out[i, head] = scores.softmax(0) @ values
        start += length
    return out


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_group_of_lengths_under_every_rule(lengths, rules):
    q, k, v = tokens_of(sum(lengths))
    got = PackedSequences(lengths, CPU).attend(q, k, v, scale=0.3, **rules)
    torch.testing.assert_close(got.double(), naive(lengths, q, k, v, scale=0.3, **rules), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rules", [{}, {"window": 6}, {"soft_cap": 0.7}], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 3, "num_kv_heads": 3},
        {"num_heads": 6, "num_kv_heads": 1},
        {"head": 24, "value": 16},
        {"head": 8, "value": 32},
        {"num_heads": 1, "num_kv_heads": 1, "head": 1, "value": 1},
    ],
    ids=str,
)
def test_every_shape_of_heads(shape, rules):
    lengths = LENGTHS["mixed"]
    q, k, v = tokens_of(sum(lengths), **shape)
    got = PackedSequences(lengths, CPU).attend(q, k, v, scale=0.3, **rules)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), naive(lengths, q, k, v, scale=0.3, **rules), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rules", [{}, {"window": 6}, {"soft_cap": 0.7}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, rules):
    lengths = LENGTHS["mixed"]
    q, k, v = tokens_of(sum(lengths), dtype=dtype)
    got = PackedSequences(lengths, CPU).attend(q, k, v, scale=0.3, **rules)
    assert got.dtype is dtype
    expected = naive(lengths, q, k, v, scale=0.3, **rules)
    torch.testing.assert_close(got.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("lengths", [LENGTHS["mixed"], LENGTHS["equal"], LENGTHS["padded, sorted"]], ids=str)
def test_slices_of_a_fused_activation(lengths):
    qkv = torch.randn(sum(lengths), 64 + 32 + 32)
    q, k, v = (x.unflatten(1, (-1, 16)) for x in qkv.split([64, 32, 32], dim=1))
    sequences = PackedSequences(lengths, CPU)
    for rules in ({}, {"window": 6}):
        expected = sequences.attend(q.contiguous(), k.contiguous(), v.contiguous(), scale=0.25, **rules)
        torch.testing.assert_close(sequences.attend(q, k, v, scale=0.25, **rules), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [100.0, float("nan")])
@pytest.mark.parametrize("rules", [{}, {"window": 6}, {"soft_cap": 0.7}], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_no_token_sees_another_sequence(lengths, rules, value):
    sequences = PackedSequences(lengths, CPU)
    tokens = tokens_of(sum(lengths))
    before = sequences.attend(*tokens, scale=0.3, **rules)
    start = 0
    for length in lengths:
        changed = tuple(x.clone() for x in tokens)
        for x in changed:
            x[start : start + length] = value
        after = sequences.attend(*changed, scale=0.3, **rules)
        assert torch.equal(after[:start], before[:start])
        assert torch.equal(after[start + length :], before[start + length :])
        start += length


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_no_token_sees_a_later_one(rules):
    lengths = LENGTHS["mixed"]
    sequences = PackedSequences(lengths, CPU)
    q, k, v = tokens_of(sum(lengths))
    before = sequences.attend(q, k, v, scale=0.01, **rules)
    is_last = torch.tensor([place == length - 1 for length in lengths for place in range(length)])
    k[is_last], v[is_last] = -5, 50
    after = sequences.attend(q, k, v, scale=0.01, **rules)
    torch.testing.assert_close(after[~is_last], before[~is_last], rtol=1e-6, atol=1e-6)
    assert not torch.isclose(after[is_last], before[is_last]).any()  # weights are nearly equal: each is seen


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_positions(lengths):
    positions = PackedSequences(lengths, CPU).positions
    assert positions.dtype is torch.int64
    assert positions.tolist() == [place for length in lengths for place in range(length)]


@pytest.mark.parametrize("rules", [{"window": 6}, {"window": 300}, {"soft_cap": 0.7}], ids=str)
@pytest.mark.parametrize("num_queries", [1, 3, 1000])
def test_scores_of_few_queries_at_a_time(num_queries, rules, monkeypatch):
    lengths = [600, 20]
    monkeypatch.setattr(attention, "_MAX_SCORES_BYTES", 4 * 1 * 600 * num_queries)
    q, k, v = tokens_of(sum(lengths), num_heads=1, num_kv_heads=1)
    got = PackedSequences(lengths, CPU).attend(q, k, v, scale=0.3, **rules)
    torch.testing.assert_close(got.double(), naive(lengths, q, k, v, scale=0.3, **rules), rtol=1e-5, atol=1e-5)


def test_a_sequence_longer_than_a_batch():
    length = 17000
    q, k, v = tokens_of(length, num_heads=1, num_kv_heads=1)
    sequences = PackedSequences([length, 2], CPU)
    q, k, v = (torch.cat([x, x[:2]]) for x in (q, k, v))
    for rules in ({}, {"window": 40}):
        got = sequences.attend(q, k, v, scale=0.3, **rules)
        first = 0 if not rules else length - 40
        scores = k[first:length, 0].double() @ q[length - 1, 0].double() * 0.3
        expected = scores.softmax(0) @ v[first:length, 0].double()
        torch.testing.assert_close(got[length - 1, 0].double(), expected, rtol=1e-4, atol=1e-4)
        assert torch.allclose(got[length:], got[:2], atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_groups_hold_every_sequence_once_and_little_padding(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = [*torch.randint(0, 3000, (200,), generator=generator).tolist(), 0, 1, 1, 20000]
    groups = attention._choose_groups(lengths)
    assert sorted(index for group in groups for index in group) == [i for i, length in enumerate(lengths) if length]
    for group in groups:
        num_places = len(group) * max(lengths[index] for index in group)
        assert len(group) == 1 or num_places <= 16384
        assert sum(lengths[index] for index in group) >= 0.75 * num_places
    assert len(groups) < 40


@pytest.mark.parametrize(
    ("lengths", "num_views"),
    [([16] * 3, 1), ([50], 1), ([9000, 9000], 2), ([4, 16, 16, 4], 1), ([13, 12], 0)],
    ids=str,
)
def test_neighbours_of_one_length_are_not_copied(lengths, num_views):
    views = [group for group in PackedSequences(lengths, CPU)._groups if group.tokens is None]
    assert len(views) == num_views
    x = torch.randn(sum(lengths), 2, 8)
    for group in views:
        assert group.gather(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_wrong_arguments_are_refused():
    sequences = PackedSequences([3, 4], CPU)
    q, k, v = tokens_of(7)
    for wrong in ((q[1:], k, v), (q, k[1:], v), (q, k, v[1:]), (q[:, :3], k, v), (q, k, v[:, :1])):
        with pytest.raises(ValueError, match="7 tokens"):
            sequences.attend(*wrong, scale=1.0)
    with pytest.raises(ValueError, match="window is 0"):
        sequences.attend(q, k, v, scale=1.0, window=0)


def test_no_sequences():
    sequences = PackedSequences([], CPU)
    assert sequences.attend(*tokens_of(0), scale=1.0).shape == (0, 4, 16)
    assert sequences.positions.shape == (0,)


def test_a_default_device_elsewhere_does_no_harm():
    lengths = LENGTHS["mixed"]
    q, k, v = tokens_of(sum(lengths))
    expected = PackedSequences(lengths, CPU).attend(q, k, v, scale=0.3, window=6)
    with torch.inference_mode(), torch.device("meta"):
        got = PackedSequences(lengths, CPU).attend(q, k, v, scale=0.3, window=6)
    assert torch.equal(got, expected)
