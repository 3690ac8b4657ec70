"""Which slice of each checkpoint tensor one tensor-parallel rank holds: arithmetic on what layers say of themselves.

A layer's own rank and number of ranks count, not the process group's: layers that are not split, or split over fewer ranks,
differ from it. What is not known to be cut by one of the rules below is refused, never guessed.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fp8refit.layers.rules import LayerRules, Why

KNOWN_LAYERS = frozenset(
    {
        "ColumnParallelLinear",
        "MergedColumnParallelLinear",
        "QKVParallelLinear",
        "ReplicatedLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
    }
)
"""Layers whose loaders cut a checkpoint tensor as `shards_of` does."""

_CUT_WITH_THE_LAYER = frozenset({"weight", "weight_scale_inv", "bias"})
_LOADERS = ("weight_loader", "weight_loader_v2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A range of one dimension of a checkpoint tensor."""

    start: int
    size: int
    full: int
    """Length of the dimension in the checkpoint."""

    @classmethod
    def whole(cls, size: int) -> "Cut":
        """All of a dimension."""
        return cls(start=0, size=size, full=size)

    @classmethod
    def of_rank(cls, ranks: tuple[int, int], size: int, num_copies: int) -> "Cut":
        """This rank's one of equal ranges, each held by `num_copies` neighbouring ranks."""
        rank, num_ranks = ranks
        return cls(start=rank // num_copies * size, size=size, full=num_ranks // num_copies * size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Rows of one live tensor that are a box of one checkpoint tensor."""

    first_row: int
    cuts: tuple[Cut, ...]
    """One a dimension."""

    @property
    def num_rows(self) -> int:
        """Rows of the live tensor; zero where a rank holds nothing of a small vocabulary."""
        return self.cuts[0].size if self.cuts else 1

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint tensor."""
        return tuple(cut.full for cut in self.cuts)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the box starts in it; empty for the origin."""
        starts = tuple(cut.start for cut in self.cuts)
        return starts if any(starts) else ()

    def view(self, tensor: Tensor) -> Tensor:
        """The rows themselves."""
        return tensor.narrow(0, self.first_row, self.num_rows) if self.cuts else tensor


def shards_of(rules: LayerRules, layer: Any, tensor: Tensor) -> tuple[Shard, ...]:
    """The checkpoint tensors that `tensor`, a weight or bias of `layer`, is made of, row after row.

    Rows after the last shard are padding: engines pad vocabularies.
    """
    if tensor.ndim == 0:
        return (Shard(first_row=0, cuts=()),) * len(part_sizes(rules, layer) or (1,))
    columns = _column_cuts(rules, layer, tensor)
    shards, first_row = [], 0
    for rows in _row_cuts(rules, layer, tensor):
        shards.append(Shard(first_row=first_row, cuts=(rows, *columns)))
        first_row += rows.size
    return tuple(shards)


def joined(shards: tuple[Shard, ...]) -> tuple[Shard, ...]:
    """The same rows as boxes of one checkpoint tensor, in which the whole tensors of `shards` lie row after row."""
    if not all(shard.cuts for shard in shards):
        return shards
    num_rows = sum(shard.cuts[0].full for shard in shards)
    boxes, first_row = [], 0
    for shard in shards:
        rows, *columns = shard.cuts
        cut = Cut(start=first_row + rows.start, size=rows.size, full=num_rows)
        boxes.append(replace(shard, cuts=(cut, *columns)))
        first_row += rows.full
    return tuple(boxes)


def part_sizes(rules: LayerRules, layer: Any) -> tuple[int, ...] | None:
    """Rows that this rank holds of each matrix of a fused layer, or None if it is not fused."""
    sizes = rules.part_sizes_of(layer)
    return sizes if len(sizes) > 1 else None


def _row_cuts(rules: LayerRules, layer: Any, tensor: Tensor) -> tuple[Cut, ...]:
    rows = tensor.shape[0]
    if _is_vocabulary(layer) and rows == layer.num_embeddings_per_partition:
        held = layer.shard_indices
        start, end = held.org_vocab_start_index, held.org_vocab_end_index
        return (Cut(start=start, size=end - start, full=layer.org_vocab_size),)
    sizes = part_sizes(rules, layer) or (rows,)
    if not _is_split_linear(rules, layer) or sum(sizes) == layer.output_size:
        return tuple(Cut.whole(size) for size in sizes)
    num_kv_copies = getattr(layer, "num_kv_head_replicas", 1)
    num_copies = (1, *(num_kv_copies for _ in sizes[1:]))
    ranks = rules.ranks_of(layer)
    return tuple(Cut.of_rank(ranks, size, copies) for size, copies in zip(sizes, num_copies, strict=True))


def _column_cuts(rules: LayerRules, layer: Any, tensor: Tensor) -> tuple[Cut, ...]:
    if _is_split_linear(rules, layer) and tensor.ndim == 2 and tensor.shape[1] != layer.input_size:
        return (Cut.of_rank(rules.ranks_of(layer), tensor.shape[1], 1),)
    return tuple(Cut.whole(size) for size in tensor.shape[1:])


def why_not_sharded(rules: LayerRules, module: Any, own: dict[str, Tensor], *, is_split: bool) -> Why:
    """What is against knowing which slices of the checkpoint `module` holds.

    Args:
        rules: The engine's.
        module: Any module of the model.
        own: Its live tensors.
        is_split: Whether any layer of the model is split over ranks.
    """
    if getattr(module, "num_added_embeddings", 0):
        return f"its vocabulary has {module.num_added_embeddings} rows added for LoRA", "Boot without enable_lora"
    if not (_is_vocabulary(module) or rules.is_linear(module)):
        return _why_not_whole(rules, module, own) if is_split else _why_not_copied(rules, module, own)
    if not is_split or _num_ranks(rules, module) == 1:
        return None
    return _why_not_known_rule(rules, module, own) or _why_not_known_sizes(rules, module, own)


def _why_not_copied(rules: LayerRules, module: Any, own: dict[str, Tensor]) -> Why:
    """What is against taking it that a module of a model that is not split holds what the checkpoint does.

    Some norms hold `weight + 1`, or `weight * scale`.
    """
    for name in own:
        loader = _loader_of(module, name)
        loader = getattr(loader, "func", loader)  # of a partial
        if loader is not None and getattr(loader, "__qualname__", "") not in rules.copying_loaders:
            return (
                f"loads `{name}` by a rule of its own, which may change its values",
                "fp8refit does not know this rule yet",
            )
    return None


def _why_not_whole(rules: LayerRules, module: Any, own: dict[str, Tensor]) -> Why:
    """What is against taking it that each rank holds all of a module that is neither linear layer nor vocabulary."""
    remedy, num_ranks = rules.remedies.one_rank, _num_ranks(rules, module)
    if num_ranks != 1 and type(module).__name__ not in rules.whole_layers:
        return f"is a {type(module).__name__}, split over {num_ranks} ranks by a rule of its own", remedy
    if next(module.children(), None) is not None:
        names = ", ".join(f"`{name}`" for name in own)
        return f"holds {names} beside its layers, and a rank may hold no more than its own heads' part", remedy
    for name, tensor in own.items():
        loader = _loader_of(module, name)
        # Cohere's norms carry the second one: it cuts matrices and leaves vectors whole.
        whole_loaders = ("default_weight_loader", "row_parallel_weight_loader")[: 1 + (tensor.ndim == 1)]
        if loader is not None and getattr(loader, "__name__", "") not in whole_loaders:
            return f"loads `{name}` by a rule of its own, which may split it over ranks", remedy
    return None


def _why_not_known_rule(rules: LayerRules, layer: Any, own: dict[str, Tensor]) -> Why:
    """What is against a split layer that loads, or of which single parameters load, otherwise than the known ones."""
    remedy, num_ranks = rules.remedies.one_rank, _num_ranks(rules, layer)
    if not _has_known_rule(layer):
        return f"is a {type(layer).__name__}, split over {num_ranks} ranks by a rule of its own", remedy
    for name in own:
        loader = _loader_of(layer, name)
        is_own_rule = loader is not None and not _has_known_rule(getattr(loader, "__self__", None))
        # What corrects a router's choices lies beside its weight, and both are whole on every rank.
        is_known = name in _CUT_WITH_THE_LAYER or (loader is None and _is_replicated(layer))
        if is_own_rule or not is_known or _is_cut_in_the_checkpoint(layer, name):
            return f"loads `{name}` by a rule of its own, which may split it over {num_ranks} ranks", remedy
    return None


def _why_not_known_sizes(rules: LayerRules, layer: Any, own: dict[str, Tensor]) -> Why:
    """What is against a linear layer whose weight is neither whole nor one of as many equal parts as there are ranks."""
    weight = own.get("weight")
    if weight is None or _is_vocabulary(layer):
        return None
    full, num_ranks = (layer.output_size, layer.input_size), _num_ranks(rules, layer)
    num_rows = sum(getattr(layer, "output_partition_sizes", (layer.output_size,)))
    is_matrix = weight.ndim == 2 and weight.shape[0] == num_rows
    if is_matrix and all(whole in (held, held * num_ranks) for held, whole in zip(weight.shape, full, strict=True)):
        return None
    reason = f"holds {list(weight.shape)} of {list(full)}, which is no even split over {num_ranks} ranks"
    return reason, rules.remedies.one_rank


def _has_known_rule(layer: object) -> bool:
    """Whether the methods that load `layer` are those of the engine's own layers."""
    classes = type(layer).__mro__
    owners = [next((cls.__name__ for cls in classes if name in vars(cls)), None) for name in _LOADERS]
    return owners[0] in KNOWN_LAYERS and owners[1] in {None, *KNOWN_LAYERS}


def _is_replicated(layer: Any) -> bool:
    """Whether each rank holds all of a linear layer that counts as split."""
    weight = layer._parameters.get("weight")
    return weight is not None and tuple(weight.shape) == (layer.output_size, layer.input_size)


def _is_cut_in_the_checkpoint(layer: Any, name: str) -> bool:
    """Whether the model's own code, or a tool before it, cuts a tensor before the layer loads it."""
    return hasattr(layer._parameters[name], "is_sharded_weight") or getattr(layer, "use_presharded_weights", False)


def _loader_of(module: Any, name: str) -> Any:
    """The function that loads a parameter, under the wrappers of online quantization."""
    loader = getattr(module._parameters[name], "weight_loader", None)
    return inspect.unwrap(loader) if loader is not None else None


def _num_ranks(rules: LayerRules, module: Any) -> int:
    return rules.ranks_of(module)[1]


def _is_vocabulary(module: Any) -> bool:
    return hasattr(module, "shard_indices")


def _is_split_linear(rules: LayerRules, layer: Any) -> bool:
    return rules.is_linear(layer) and not _is_vocabulary(layer) and _num_ranks(rules, layer) != 1
