"""A pass through attention layers that are measured: what is seen, what they compute, and that they come back."""

import pytest
import torch
from torch import Tensor, nn

from fp8refit.ranks.kv.attention import PackedSequences
from fp8refit.ranks.kv.measuring import Heads, measured

LENGTHS = [5, 1, 3]
NUM_TOKENS = sum(LENGTHS)
HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=6, scale=0.3)
WINDOWED = Heads(num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=6, scale=0.3, window=2, soft_cap=0.7)


class OwnAttention(nn.Module):
    """An engine's layer, which needs a KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, q: Tensor, *_: object, **__: object) -> Tensor:
        self.num_calls += 1
        return q + 1


@pytest.fixture
def layers() -> list[OwnAttention]:
    return [OwnAttention(), OwnAttention()]


@pytest.fixture
def sequences() -> PackedSequences:
    return PackedSequences(LENGTHS, torch.device("cpu"))


def inputs_of(heads: Heads, *, is_flat: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(heads.num_heads, heads.head_dim), (heads.num_kv_heads, heads.head_dim)]
    shapes.append((heads.num_kv_heads, heads.v_head_dim))
    tensors = [torch.randn((NUM_TOKENS, *shape), generator=generator) for shape in shapes]
    return [tensor.flatten(1) for tensor in tensors] if is_flat else tensors


@pytest.mark.parametrize("heads", [HEADS, WINDOWED], ids=["plain", "windowed"])
@pytest.mark.parametrize("is_flat", [True, False])
def test_each_layer_attends_plainly_and_is_seen_under_its_place(is_flat, heads, layers, sequences):
    inputs, seen = inputs_of(heads, is_flat=is_flat), []
    q, k, v = inputs_of(heads, is_flat=False)
    wanted = sequences.attend(q, k, v, scale=heads.scale, window=heads.window, soft_cap=heads.soft_cap).flatten(1)
    with measured([(layer, heads) for layer in layers], sequences, lambda *observed: seen.append(observed)):
        for layer in reversed(layers):
            assert torch.equal(layer(*inputs, "anything else", output_shape=None), wanted)
    assert [index for index, *_ in seen] == [1, 0]
    for _, *tensors in seen:
        assert all(torch.equal(got, expected) for got, expected in zip(tensors, (q, k, v), strict=True))
    assert [layer.num_calls for layer in layers] == [0, 0]


def test_layers_compute_their_own_way_again(layers, sequences):
    with measured([(layer, HEADS) for layer in layers], sequences, lambda *_: None):
        assert all("forward" in vars(layer) for layer in layers)
    for layer in layers:
        assert "forward" not in vars(layer)
        assert torch.equal(layer(torch.zeros(2)), torch.ones(2))


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=repr)
def test_layers_come_back_from_whatever_stops_the_pass(error, layers, sequences):
    def observe(*_: object) -> None:
        raise error

    with (
        pytest.raises(type(error)) as caught,
        measured([(layer, HEADS) for layer in layers], sequences, observe),
    ):
        layers[0](*inputs_of(HEADS, is_flat=True))
    assert caught.value is error
    assert not any("forward" in vars(layer) for layer in layers)


def test_a_layer_that_cannot_be_measured_leaves_the_others_as_they_were(layers, sequences):
    with pytest.raises(AttributeError), measured([(layers[0], HEADS), (object(), HEADS)], sequences, lambda *_: None):
        raise AssertionError("unreachable")
    assert "forward" not in vars(layers[0])


def test_what_is_seen_is_not_quantized_and_keeps_its_dtype(layers, sequences):
    inputs, seen = [tensor.to(torch.bfloat16) for tensor in inputs_of(HEADS, is_flat=True)], []
    inputs[1][0, 0] = 1e5
    with measured([(layers[0], HEADS)], sequences, lambda *observed: seen.append(observed)):
        assert layers[0](*inputs).dtype is torch.bfloat16
    assert seen[0][2].dtype is torch.bfloat16
    assert seen[0][2].max() == torch.tensor(1e5, dtype=torch.bfloat16)
