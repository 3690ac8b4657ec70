"""What an adapter says about its engine's kernels. Everything else is read from the model's twin."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from fp8refit.live.formats import BlockFormat
from fp8refit.live.slots import Refresh

Why: TypeAlias = tuple[str, str] | None
"""Reason and remedy; None if there is no problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """The kernel that multiplies by the weight of a layer with block scales."""

    name: str
    format: BlockFormat | None
    """What it reads; None if that is not known, or not what a `BlockFormat` can say."""
    remedy: str
    """How to select another kernel."""


class KernelRules(Protocol):
    """What one engine's kernels do to weights after loading."""

    to_quantize: str | None
    """What a user can set, in the engine's own words, so that a model without quantized weights has some; None if it needs
    none."""
    other_quantization: str
    """The same for a layer with another quantization."""
    absorbed: tuple[str, str]
    """Attributes of a latent attention layer that hold absorbed keys and values; see `fp8refit.live.latent.Absorbed`."""

    def why_refused(self, module: nn.Module) -> Why:
        """Say why `module`, with or without parameters, cannot be refitted, for reasons that only this engine knows."""
        ...

    def kernel_of(self, module: nn.Module) -> Kernel:
        """Return the kernel of a module with block scales."""
        ...

    def swaps_halves(self, module: nn.Module) -> bool:
        """Whether the kernel of an expert layer keeps the two halves of `w13_weight` swapped."""
        ...

    def kept(self, module: nn.Module) -> Collection[str]:
        """Return the module's parameters that are not weights. They have no slot, and a refit does not change them."""
        ...

    def dequantize(self, layer: Any, dtype: torch.dtype) -> Tensor:
        """Return the weight (N, K) of a linear layer, dequantized as the engine does it at boot, bit for bit."""
        ...

    def refreshes(self, model: nn.Module) -> Iterable[Refresh]:
        """Return the steps that update what else the engine derives from weights, at boot or at the first forward."""
        ...
