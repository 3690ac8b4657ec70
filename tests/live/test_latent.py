"""Absorbed copies of latent attention: recomputed in place, and watched."""

import pytest
import torch
from torch import nn

from fp8refit.live.latent import Absorbed, with_absorbed
from fp8refit.live.slots import Inventory

NUM_HEADS, KEY_ROWS, VALUE_ROWS, LATENT = 2, 3, 4, 5


def attention_of(*, are_parameters=False) -> nn.Module:
    """Copies in the strides that engines give them: each a transposed view."""
    attention = nn.Module()
    keys = torch.zeros(NUM_HEADS, LATENT, KEY_ROWS, dtype=torch.bfloat16).transpose(1, 2)
    values = torch.zeros(NUM_HEADS, VALUE_ROWS, LATENT, dtype=torch.bfloat16).transpose(1, 2)
    for name, copy in {"keys": keys, "values": values}.items():
        setattr(attention, name, nn.Parameter(copy, requires_grad=False) if are_parameters else copy)
    return attention


def absorbed(attention: nn.Module, weight: torch.Tensor, source: torch.Tensor | None = None) -> Absorbed:
    return Absorbed(
        name="attn",
        owner=attention,
        keys="keys",
        values="values",
        source=weight if source is None else source,
        dequantized=lambda dtype: weight.to(dtype),
    )


def weight_of(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(NUM_HEADS * (KEY_ROWS + VALUE_ROWS), LATENT)


@pytest.mark.parametrize("are_parameters", [False, True])
def test_each_head_gets_its_rows_in_the_storage_that_it_had(are_parameters):
    attention = attention_of(are_parameters=are_parameters)
    places = [(copy.data_ptr(), copy.stride()) for copy in (attention.keys, attention.values)]
    weight = weight_of(0)
    inventory = with_absorbed(Inventory(slots=()), [absorbed(attention, weight)])
    for refresh in inventory.refreshes:
        refresh.run()
    for head in range(NUM_HEADS):
        first = head * (KEY_ROWS + VALUE_ROWS)
        assert torch.equal(attention.keys[head], weight[first : first + KEY_ROWS].bfloat16())
        assert torch.equal(attention.values[head], weight[first + KEY_ROWS :][:VALUE_ROWS].bfloat16().t())
    assert [(copy.data_ptr(), copy.stride()) for copy in (attention.keys, attention.values)] == places


def test_a_refresh_reads_the_weight_that_is_there_then():
    attention, weight = attention_of(), weight_of(0)
    (refresh,) = with_absorbed(Inventory(slots=()), [absorbed(attention, weight)]).refreshes
    weight.copy_(weight_of(1))
    refresh.run()
    assert torch.equal(attention.keys[0], weight_of(1)[:KEY_ROWS].bfloat16())


def test_views_of_the_weight_itself_need_no_refresh():
    weight = weight_of(0)
    heads = weight.unflatten(0, (NUM_HEADS, -1))
    attention = nn.Module()
    attention.keys, attention.values = heads[:, :KEY_ROWS], heads[:, KEY_ROWS:].transpose(1, 2)
    assert with_absorbed(Inventory(slots=()), [absorbed(attention, weight)]).refreshes == ()
    copied = absorbed(attention, weight, source=weight.clone())
    assert [refresh.name for refresh in with_absorbed(Inventory(slots=()), [copied]).refreshes] == [
        "attn: absorbed copies"
    ]


def test_plain_attributes_are_watched():
    attention = attention_of()
    inventory = with_absorbed(Inventory(slots=()), [absorbed(attention, weight_of(0))])
    assert [live.name for live in inventory.live] == ["attn.keys", "attn.values"]
    assert not any(live.has_moved for live in inventory.live)
    attention.keys = attention.keys.clone()
    assert [live.name for live in inventory.live if live.has_moved] == ["attn.keys"]


def test_parameters_are_watched_already():
    attention = attention_of(are_parameters=True)
    assert with_absorbed(Inventory(slots=()), [absorbed(attention, weight_of(0))]).live == ()
