"""A Megatron-core model, made of a checkpoint as Megatron's ranks hold it, is that checkpoint again."""

import pytest
import torch
from torch import Tensor

from fp8refit.sources.sharded.gather import gathered
from fp8refit.training.megatron import MegatronNames

HIDDEN, HEAD, HEADS, GROUPS, INTERMEDIATE = 16, 4, 6, 2, 24


def checkpoint() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    attention, mlp, experts = (f"model.layers.{layer}" for layer in ("0.self_attn", "0.mlp", "1.mlp.experts"))
    shapes = {
        "model.embed_tokens.weight": (40, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (40, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        f"{attention}.q_proj.weight": (HEADS * HEAD, HIDDEN),
        f"{attention}.k_proj.weight": (GROUPS * HEAD, HIDDEN),
        f"{attention}.v_proj.weight": (GROUPS * HEAD, HIDDEN),
        f"{attention}.q_proj.bias": (HEADS * HEAD,),
        f"{attention}.k_proj.bias": (GROUPS * HEAD,),
        f"{attention}.v_proj.bias": (GROUPS * HEAD,),
        f"{attention}.o_proj.weight": (HIDDEN, HEADS * HEAD),
        f"{mlp}.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{mlp}.up_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{mlp}.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "model.layers.1.mlp.gate.weight": (2, HIDDEN),
        **{f"{experts}.{index}.{part}_proj.weight": (8, HIDDEN) for index in range(2) for part in ("gate", "up")},
        **{f"{experts}.{index}.down_proj.weight": (HIDDEN, 8) for index in range(2)},
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def fused_qkv(weights: dict[str, Tensor], kind: str) -> Tensor:
    """Group by group: its queries, its key, its value."""
    q, k, v = (weights[f"model.layers.0.self_attn.{part}_proj.{kind}"].split(HEAD) for part in "qkv")
    per_group = HEADS // GROUPS
    return torch.cat(
        [
            rows
            for group in range(GROUPS)
            for rows in (*q[group * per_group : (group + 1) * per_group], k[group], v[group])
        ]
    )


def fused_fc1(weights: dict[str, Tensor], module: str, num_ranks: int) -> Tensor:
    """Rank by rank: its gate, its up."""
    gate, up = (weights[f"{module}.{part}_proj.weight"].chunk(num_ranks) for part in ("gate", "up"))
    return torch.cat([rows for rank in range(num_ranks) for rows in (gate[rank], up[rank])])


def megatron(weights: dict[str, Tensor], num_ranks: int) -> dict[str, Tensor]:
    layer, experts = "decoder.layers.0", "model.layers.1.mlp.experts"
    return {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        f"{layer}.self_attention.linear_qkv.layer_norm_weight": weights["model.layers.0.input_layernorm.weight"],
        f"{layer}.self_attention.linear_qkv.weight": fused_qkv(weights, "weight"),
        f"{layer}.self_attention.linear_qkv.bias": fused_qkv(weights, "bias"),
        f"{layer}.self_attention.linear_proj.weight": weights["model.layers.0.self_attn.o_proj.weight"],
        f"{layer}.pre_mlp_layernorm.weight": weights["model.layers.0.post_attention_layernorm.weight"],
        f"{layer}.mlp.linear_fc1.weight": fused_fc1(weights, "model.layers.0.mlp", num_ranks),
        f"{layer}.mlp.linear_fc2.weight": weights["model.layers.0.mlp.down_proj.weight"],
        "decoder.layers.1.mlp.router.weight": weights["model.layers.1.mlp.gate.weight"],
        "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight": fused_fc1(weights, f"{experts}.0", 1),
        "decoder.layers.1.mlp.experts.linear_fc1.weight1": fused_fc1(weights, f"{experts}.1", 1),
        "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight": weights[f"{experts}.0.down_proj.weight"],
        "decoder.layers.1.mlp.experts.linear_fc2.weight1": weights[f"{experts}.1.down_proj.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "output_layer.weight": weights["lm_head.weight"],
    }


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("max_bytes", [1 << 20, 500])
def test_a_checkpoint_comes_back(num_ranks, max_bytes):
    weights = checkpoint()
    rename = MegatronNames(num_query_groups=GROUPS, head_dim=HEAD, tensor_parallel=num_ranks)
    source = gathered(megatron(weights, num_ranks), rename=rename, bucket_bytes=max_bytes)
    given = dict(source)
    assert given.keys() == weights.keys()
    assert all(torch.equal(given[name], weights[name]) for name in weights)
    assert {name: meta.shape for name, meta in source.scan()[0].items()} == {
        name: tuple(weights[name].shape) for name in weights
    }


def test_a_name_that_is_not_known_is_given_as_it_is():
    rename = MegatronNames(num_query_groups=GROUPS, head_dim=HEAD)
    bias = torch.ones(3)
    for name in ("decoder.layers.0.mlp.linear_fc1.bias", "vision_model.weight"):
        assert list(rename(name, bias)) == [(name, bias)]


@pytest.mark.parametrize("max_bytes", [1 << 20, 256])
def test_rows_of_padding_are_cut(max_bytes):
    weights = checkpoint()
    padded = megatron(weights, 1)
    top = ("embedding.word_embeddings.weight", "output_layer.weight")
    padded |= {name: torch.cat([padded[name], torch.full((8, HIDDEN), torch.nan)]) for name in top}
    names = MegatronNames(num_query_groups=GROUPS, head_dim=HEAD, vocab_size=40)
    found: dict[str, list[Tensor]] = {}
    source = gathered(padded, rename=names)
    for piece in source.pieces(max_bytes):
        found.setdefault(piece.name, []).append(piece.tensor.clone())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert source.metadata[name].shape == (40, HIDDEN)
        assert torch.equal(torch.cat(found[name]), weights[name])
    plain = dict(gathered(megatron(weights, 1), rename=names))
    assert torch.equal(plain["lm_head.weight"], weights["lm_head.weight"])
