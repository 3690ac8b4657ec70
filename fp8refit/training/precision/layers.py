"""Changes a trainer's modules in place: same modules, same parameters, but they compute as the engine does."""

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8refit.live.formats import BlockFormat
from fp8refit.training.precision.products import BLOCK, GroupedProduct, Product
from fp8refit.training.precision.weights import TrainedWeight

if TYPE_CHECKING:
    _Linear = nn.Linear
else:
    _Linear = object


def make_linear(module: nn.Linear, weight: TrainedWeight) -> None:
    """Make a linear layer multiply by its weight as the engine holds it."""
    module.__class__ = _subclass(type(module), Fp8Linear)  # type: ignore[arg-type]
    module.trained_weight = weight  # type: ignore[assignment]


def make_experts(module: nn.Module, weights: dict[str, TrainedWeight]) -> None:
    """Make a layer's experts multiply by their weights as the engine holds them."""
    module.__class__ = _subclass(type(module), Fp8Experts)  # type: ignore[arg-type]
    module.trained_weights = weights  # type: ignore[assignment]


def make_rounded(module: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Make a module see its parameters in the engine's dtypes. Gradients reach the masters as if nothing were rounded."""
    module.__class__ = _rounded(type(module), tuple(dtypes.items()))  # type: ignore[arg-type]


@functools.cache
def _subclass(kind: type, mixin: type) -> Any:
    return type(f"Fp8{kind.__name__}", (mixin, kind), {"__module__": __name__})


@functools.cache
def _rounded(kind: type, dtypes: tuple[tuple[str, torch.dtype], ...]) -> Any:
    def rounded(name: str, dtype: torch.dtype) -> property:
        def value(module: nn.Module) -> Tensor | None:
            held = module._parameters[name]
            return held if held is None or hasattr(held, "placements") else held.to(dtype)  # FSDP needs its shards

        return property(value)

    properties: dict[str, Any] = {name: rounded(name, dtype) for name, dtype in dtypes}
    return type(f"Rounded{kind.__name__}", (kind,), {"__module__": __name__, **properties})


class Fp8Linear(_Linear):
    """`y = x w^T + b` with the codes and scales of the weight."""

    trained_weight: TrainedWeight

    def forward(self, x: Tensor) -> Tensor:
        """Multiply `x` (..., K) and return (..., N) in its dtype, or autocast's."""
        weight = self.trained_weight
        codes, scale = _fresh(weight)
        x = _cast(x)
        x_MK = x.reshape(-1, self.in_features)
        y_MN: Tensor = Product.apply(x_MK, self.weight, codes, scale, *_how(weight, x, codes))  # type: ignore[no-untyped-call]
        if self.bias is not None:
            y_MN = y_MN + self.bias.to(y_MN.dtype)
        return y_MN.view(*x.shape[:-1], self.out_features)


class Fp8Experts(nn.Module):
    """Experts held as stacks, `gate_up_proj` (E, 2 I, H) and `down_proj` (E, H, I), as in Qwen3-MoE."""

    trained_weights: dict[str, TrainedWeight]
    gate_up_proj: Tensor
    down_proj: Tensor

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send each token (N, H) through its experts (N, k), and sum their outputs by the weights (N, k)."""
        x_NH = _cast(hidden_states)
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        token = order // top_k_index.shape[-1]
        counts = chosen.bincount(minlength=len(self.gate_up_proj)).tolist()
        gate_up = self._multiply("gate_up_proj", x_NH[token], counts)
        y = self._multiply("down_proj", self._apply_gate(gate_up), counts)  # type: ignore[operator]
        y = y * top_k_weights.flatten()[order, None]
        return torch.zeros_like(hidden_states).index_add_(0, token, y.to(hidden_states.dtype))

    def _multiply(self, key: str, x_MK: Tensor, counts: list[int]) -> Tensor:
        weight = self.trained_weights[key]
        codes, scale = _fresh(weight)
        held = getattr(self, key)
        y: Tensor = GroupedProduct.apply(x_MK, held, codes, scale, counts, *_how(weight, x_MK, codes))  # type: ignore[no-untyped-call]
        return y


def _cast(x: Tensor) -> Tensor:
    """Cast an input as autocast does."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _fresh(weight: TrainedWeight) -> tuple[Tensor, Tensor]:
    """Return up-to-date codes and scales. In a compiled model, the hook of a module around this one has updated them."""
    weight.ensure_fresh()
    assert weight.codes is not None and weight.scale is not None, f"{weight.name=}"
    return weight.codes, weight.scale


def _how(weight: TrainedWeight, x: Tensor, codes: Tensor) -> tuple[BlockFormat, bool]:
    """Return the format, and whether the device has FP8 products for such blocks."""
    is_native = (
        x.dtype is torch.bfloat16
        and weight.format.block_size == (BLOCK, BLOCK)
        and codes.shape[-1] % BLOCK == 0
        and codes.shape[-2] % BLOCK == 0
        and weight.has_fp8_products
    )
    return weight.format, is_native
