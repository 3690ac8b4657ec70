"""What an adapter says of its engine's kernels. Everything else about a model is read off its twin."""

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
class Remedies:
    """What a user sets, in the engine's own words."""

    no_block_fp8: str
    """For a model without any block-FP8 weight."""
    other_quantization: str
    """For a layer that is quantized otherwise."""


class KernelRules(Protocol):
    """What one engine's kernels do to weights once they are loaded."""

    remedies: Remedies

    def why_refused(self, module: nn.Module) -> Why:
        """What is against `module`, with parameters of its own or without, that only this engine has."""
        ...

    def kernel_of(self, module: nn.Module) -> Kernel:
        """What multiplies by the weights of a module with block scales."""
        ...

    def block_size_of(self, module: nn.Module) -> tuple[int, int]:
        """Rows and columns of one block, of a module that `kernel_of` says is row-major."""
        ...

    def swaps_halves(self, module: nn.Module) -> bool:
        """Whether the kernel of a layer of experts keeps the two halves of `w13_weight` the other way round."""
        ...

    def kept(self, module: nn.Module) -> Collection[str]:
        """Parameters of its own that are no weights: no slot holds them, and a refit leaves them as they are."""
        ...
