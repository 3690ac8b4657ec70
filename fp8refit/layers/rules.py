"""What an adapter says of its engine's layers. Everything else about them is the same in every engine of the family."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import nn

from fp8refit.slots import ScaleFormat

Why: TypeAlias = tuple[str, str] | None
"""Reason and remedy, or None if there is nothing against it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """What multiplies by the weight of a block-FP8 layer."""

    name: str
    is_row_major: bool
    """Whether it is known to read weights and scales as a checkpoint stores them."""
    scale_format: ScaleFormat
    remedy: str
    """What to set for another kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """What an engine says of one layer of experts."""

    gate: str
    up: str
    down: str
    """Checkpoint modules of one expert: `gate_proj`, or `w1`."""
    ids: tuple[int, ...]
    """The checkpoint's expert in each place of this rank."""
    num_experts: int
    """Experts in the checkpoint."""
    hidden_size: int
    intermediate_size: int
    """Of the checkpoint's matrices."""
    ranks: tuple[int, int]
    """Which of how many equal parts of each expert's intermediate dimension this rank holds."""
    block_size: tuple[int, int]
    kernel: Kernel
    shared: str | None = None
    """Checkpoint module, beside that of the experts, of one that every token takes and that lies in the place after `ids`."""
    is_up_first: bool = False
    """Whether up projections lie above gate projections."""
    is_stack_transposed: bool = False
    """Whether a stack of this model's has rows and columns exchanged, where its shape leaves it open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedies:
    """What a user sets, in the engine's own words."""

    no_block_fp8: str
    """For a model without any block-FP8 weight."""
    other_quantization: str
    """For a layer that is quantized otherwise."""
    one_rank: str = ""
    """For a layer of which nobody knows which slice a rank holds."""


class LayerRules(Protocol):
    """One engine's ways.

    Layers are told by attributes that the family shares: `output_partition_sizes`, `num_kv_head_replicas`, `shard_indices`.
    """

    remedies: Remedies
    whole_layers: frozenset[str]
    """Classes of layers that know the number of ranks and hold everything on each."""
    copying_loaders: frozenset[str]
    """Qualified names of loaders of single parameters that copy a checkpoint tensor, or a rank's slice of it."""

    def why_refused(self, module: nn.Module) -> Why:
        """What is against `module`, with parameters of its own or without, that only this engine has."""
        ...

    def is_linear(self, module: nn.Module) -> bool:
        """Whether it is one of the engine's linear layers, with an `input_size` and an `output_size` over all ranks."""
        ...

    def ranks_of(self, module: nn.Module) -> tuple[int, int]:
        """Its rank, and the number of ranks that split it: 0 and 1 if it is not split."""
        ...

    def part_sizes_of(self, module: nn.Module) -> tuple[int, ...]:
        """Rows that this rank holds of each matrix in it, in storage order; fewer than two if it is not fused."""
        ...

    def kernel_of(self, module: nn.Module) -> Kernel:
        """What multiplies by the weight of a module with block scales."""
        ...

    def block_size_of(self, module: nn.Module) -> tuple[int, int]:
        """Rows and columns of one block, of a module that `kernel_of` says is row-major."""
        ...

    def experts_of(self, prefix: str, module: nn.Module) -> Experts:
        """What is known of a module with `w13_weight`, whose name is `prefix`."""
        ...

    def kept(self, module: nn.Module) -> Collection[str]:
        """Parameters of its own that are no weights: no slot holds them, and a refit leaves them as they are."""
        ...
