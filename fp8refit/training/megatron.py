"""Checkpoint tensors from Megatron-core's classic GPT layout, for `fp8refit.gathered(..., rename=...)`.

Megatron's tensor-parallel parameters are plain tensors; each rank holds a part along `partition_dim`. Describe them to
PyTorch on the mesh of the tensor-parallel ranks, which needs no communication:

    mesh = DeviceMesh.from_group(parallel_state.get_tensor_model_parallel_group(), "cuda")
    state_dict = {
        name: DTensor.from_local(parameter, mesh, [Shard(parameter.partition_dim)], run_check=False)
        if parameter.tensor_model_parallel
        else parameter
        for name, parameter in model.named_parameters()
    }
    with fp8refit.gathered(state_dict, rename=MegatronNames(...)) as weights:
        ...

Each pipeline stage counts its layers from zero, and each expert-parallel rank its experts. Renumber them for the whole
model, and gather what only some ranks hold:

    state_dict = dict(global_names(state_dict, first_layer=..., first_expert=...))
    with fp8refit.gathered(state_dict, WORLD, rename=MegatronNames(...), is_apart=True) as weights:
        ...

For a different layout, write your own function; see `fp8refit.sources.sharded.renaming.Renamer`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

_LAYER = re.compile(r"(?:.*\.)?decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d+))")

_LAYER_NUMBER = re.compile(r"(\bdecoder\.layers\.)(\d+)(?=\.)")
_EXPERT_NUMBER = re.compile(r"(\bmlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)")

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}


def global_names(
    state_dict: Mapping[str, Tensor], *, first_layer: int = 0, first_expert: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one rank under their names in the whole model.

    Args:
        state_dict: Megatron's names, where a rank counts its own layers and experts.
        first_layer: Number of this rank's first layer in the whole model.
        first_expert: Number of its first expert in the whole model.

    Examples:
        >>> [name for name, _ in global_names({"decoder.layers.1.mlp.linear_fc2.weight": torch.empty(2)}, first_layer=8)]
        ['decoder.layers.9.mlp.linear_fc2.weight']
    """
    for name, tensor in state_dict.items():
        counted = _LAYER_NUMBER.sub(lambda found: f"{found[1]}{int(found[2]) + first_layer}", name)
        counted = _EXPERT_NUMBER.sub(lambda found: f"{found[1]}{int(found[2]) + first_expert}", counted)
        yield counted, tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronNames:
    """Gives a Megatron-core GPT model Hugging Face names and splits its fused matrices. Implements `Renamer`.

    `linear_qkv` holds, for each query group, the rows of its query heads, then its key, then its value. `linear_fc1`
    holds, for each tensor-parallel rank, its rows of `gate`, then its rows of `up`.

    Examples:
        >>> names = MegatronNames(num_query_groups=2, head_dim=4, tensor_parallel=1)
        >>> fused = torch.empty(24, 8)
        >>> [(name, tuple(part.shape)) for name, part in names("decoder.layers.0.mlp.linear_fc1.weight", fused)]
        [('model.layers.0.mlp.gate_proj.weight', (12, 8)), ('model.layers.0.mlp.up_proj.weight', (12, 8))]
    """

    num_query_groups: int
    """Of the whole model: `num_key_value_heads` in the checkpoint's config."""
    head_dim: int
    tensor_parallel: int = 1
    """Ranks that matrices are split over."""
    expert_tensor_parallel: int = 1
    """Ranks that the matrices of one expert are split over."""
    vocab_size: int | None = None
    """Rows of the checkpoint's embedding and LM head, if the trainer pads them (`make_vocab_size_divisible_by`)."""

    def __call__(self, name: str, tensor: Tensor, /) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint names and tensors that one of the trainer's tensors holds. Unknown names pass
        unchanged.
        """
        if name in _TOP:
            is_padded = self.vocab_size is not None and tensor.ndim == 2 and tensor.shape[0] > self.vocab_size
            yield _TOP[name], tensor[: self.vocab_size] if is_padded else tensor
            return
        found = _LAYER.fullmatch(name)
        if found is None:
            yield name, tensor
            return
        layer, rest = f"model.layers.{found[1]}", found[2]
        expert = _EXPERT.fullmatch(rest)
        if rest in _IN_LAYER:
            yield f"{layer}.{_IN_LAYER[rest]}", tensor
        elif rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            parts = self._split_qkv(tensor)
            kind = rest.rpartition(".")[2]
            yield from (
                (f"{layer}.self_attn.{part}_proj.{kind}", rows) for part, rows in zip("qkv", parts, strict=True)
            )
        elif rest == "mlp.linear_fc1.weight":
            yield from self._split_fc1(f"{layer}.mlp", tensor, self.tensor_parallel)
        elif expert is not None:
            module = f"{layer}.mlp.experts.{expert[1] or expert[4]}"
            if (expert[2] or expert[3]) == "linear_fc1":
                yield from self._split_fc1(module, tensor, self.expert_tensor_parallel)
            else:
                yield f"{module}.down_proj.weight", tensor
        else:
            yield name, tensor

    def _split_qkv(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split rows (groups * (heads per group + 2) * head_dim, ...) into q, k and v."""
        groups = fused.view(self.num_query_groups, -1, *fused.shape[1:])
        num_query_rows = groups.shape[1] - 2 * self.head_dim
        query, key, value = groups.split_with_sizes([num_query_rows, self.head_dim, self.head_dim], dim=1)
        return query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)

    def _split_fc1(self, module: str, fused: Tensor, num_ranks: int) -> Iterator[tuple[str, Tensor]]:
        gate, up = fused.view(num_ranks, 2, -1, *fused.shape[1:]).unbind(1)
        yield f"{module}.gate_proj.weight", gate.flatten(0, 1)
        yield f"{module}.up_proj.weight", up.flatten(0, 1)
