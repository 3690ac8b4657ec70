"""The policy of a model with LoRA adapters: whole weights, merged one at a time.

The model is not changed. This module reads the layers of the `peft` library without importing it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.errors import InvalidSourceError
from fp8refit.fill.kernels.merge import Product, add_products
from fp8refit.live.names import strip_wrappers
from fp8refit.live.slots import TensorMeta
from fp8refit.live.storage import why_unreadable
from fp8refit.sources.row_runs import Piece, Recipe, cut

_ALIGNMENT_BYTES = 256
"""Of a merged weight in memory that several share: kernels use wide loads on aligned rows."""


def merged(model: nn.Module) -> "Merged":
    """Yield every weight of a model under its checkpoint name, with its active LoRA adapters merged: `W + s B A`.

    Weights are merged each time they are read, in the dtype of `W`: products are added up in fp32 and rounded once. A
    refit reads them in pieces and needs memory for one merged weight or one bucket. Iterating gives each as a new tensor.
    Modules trained whole (`modules_to_save`) are given as trained. Adapters that are already merged or disabled are not
    applied.

    Args:
        model: A `PeftModel`, or any model with `peft` layers.

    Raises:
        InvalidSourceError: An adapter is more than `s B A`, such as DoRA. Raised at once, naming every such layer.

    Examples:
        >>> refitter.refit(merged(model))                           # doctest: +SKIP
    """
    layers = dict(_layers(model))
    problems = [f"{name}: {why}; call merge_adapter() and send the state dict" for name, why in _problems(layers)]
    if problems:
        raise InvalidSourceError(problems)
    return Merged(layers)


class Merged:
    """The weights that `merged` returns, as an `fp8refit.sources.source.Source`."""

    is_repeatable = True

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        weights: dict[str, _Weight] = {}
        for weight in _weights(layers):
            weights.setdefault(weight.name, weight)
        self._weights = tuple(weights.values())

    def scan(self) -> tuple[dict[str, TensorMeta], tuple[str, ...]]:
        """Read names, shapes and dtypes, without merging anything."""
        metadata, problems = {}, []
        for weight in self._weights:
            value = weight.value
            if problem := why_unreadable(value):
                problems.append(f"{weight.name}: {problem}")
            else:
                metadata[weight.name] = TensorMeta.of(value)
        return metadata, tuple(problems)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight, merged."""
        for each in self.recipes(sys.maxsize):
            if isinstance(each, Piece):
                yield each.name, each.tensor
                continue
            out = torch.empty(each.tensor.shape, dtype=each.tensor.dtype, device=each.tensor.device)
            self.make([each], [out])
            yield each.name, out
            del out

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        """Yield the weights in pieces. On a GPU, as many are merged at once as there is room for in `max_bytes`; later
        ones overwrite them on the current stream.
        """
        buffer, used = torch.empty(0, dtype=torch.uint8), 0
        batch: list[tuple[Piece, Recipe | None]] = []
        for each in self.recipes(max_bytes):
            if isinstance(each, Piece):
                batch.append((each, None))
                continue
            rows = each.tensor
            if used + rows.nbytes > buffer.nbytes or buffer.device != rows.device:
                yield from self._made(batch)
                batch, used = [], 0
            if rows.nbytes > buffer.nbytes or buffer.device != rows.device:
                num_bytes = min(max_bytes, self._num_merged_bytes()) if _shares_launches(rows.device) else 0
                buffer = torch.empty(max(num_bytes, rows.nbytes), dtype=torch.uint8, device=rows.device)
            out = buffer[used : used + rows.nbytes].view(rows.dtype).view(rows.shape)
            used += -(-rows.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            batch.append((each.piece(out), each))
        yield from self._made(batch)

    def recipes(self, max_bytes: int) -> Iterator[Piece | Recipe]:
        """See `fp8refit.sources.row_runs.MakesPieces`."""
        for weight in self._weights:
            value, adapters = weight.value, weight.adapters
            if value.nbytes <= max_bytes:
                whole = Piece(name=weight.name, first_row=0, tensor=value, full_shape=tuple(value.shape))
                yield _Rows.of(whole, weight, adapters) if adapters else whole
                continue
            for piece in cut(weight.name, value, max_bytes):
                yield _Rows.of(piece, weight, adapters) if adapters else piece

    @torch.no_grad()
    def make(self, recipes: Sequence[Recipe], outs: Sequence[Tensor]) -> None:
        """Merge rows, in one launch for each adapter that a weight has at most."""
        rows = [(each, out) for each, out in zip(recipes, outs, strict=True) if isinstance(each, _Rows)]
        for number in range(max((len(each.adapters) for each, _ in rows), default=0)):
            products = [each.add(number, out) for each, out in rows if number < len(each.adapters)]
            add_products([product for product in products if product is not None])

    def _made(self, batch: Sequence[tuple[Piece, Recipe | None]]) -> Iterator[Piece]:
        """Yield pieces, those with recipes once they are made."""
        made = [(recipe, piece.tensor) for piece, recipe in batch if recipe is not None]
        self.make([recipe for recipe, _ in made], [out for _, out in made])
        return (piece for piece, _ in batch)

    def _num_merged_bytes(self) -> int:
        return sum(weight.value.nbytes + _ALIGNMENT_BYTES for weight in self._weights if weight.is_adapted)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Weight:
    """One weight of a layer."""

    name: str
    module: nn.Module
    """The module that holds it."""
    key: str
    """Its name there."""
    layer: Any
    """The layer around that module, or the same module."""

    @property
    def value(self) -> Tensor:
        """The weight, not merged."""
        module, key = self.module, self.key
        value = module._parameters[key] if key in module._parameters else module._buffers[key]
        assert value is not None, f"{self.name=}"
        return value.detach()

    @property
    def is_adapted(self) -> bool:
        """Whether there are adapters for it, active or not."""
        return self.layer is not self.module and self.key == "weight"

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters to add to it."""
        return tuple(_active(self.layer)) if self.is_adapted else ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Rows(Recipe):
    """Rows of a weight, and the adapters to add to them."""

    weight: _Weight
    adapters: tuple[str, ...]

    @classmethod
    def of(cls, piece: Piece, weight: _Weight, adapters: tuple[str, ...]) -> "_Rows":
        """To be made of the unmerged rows."""
        return cls(
            name=piece.name,
            first_row=piece.first_row,
            tensor=piece.tensor,
            full_shape=piece.full_shape,
            weight=weight,
            adapters=adapters,
        )

    def add(self, number: int, out: Tensor) -> Product | None:
        """The product that writes the rows with an adapter added to `out`, which holds those with the ones before it;
        None if that was done.
        """
        rows, adapter, layer = self.tensor if number == 0 else out, self.adapters[number], self.weight.layer
        end_row = self.first_row + rows.shape[0]
        product = _product(layer, adapter)
        if product is None:
            delta = layer.get_delta_weight(adapter).to(rows.dtype)
            torch.add(rows, delta[self.first_row : end_row], out=out)
            return None
        up, down = product
        up = up.detach() if self.is_whole else up.detach()[self.first_row : end_row]
        return Product(weight=rows, up=up, down=down.detach(), scale=layer.scaling[adapter], out=out)


def _shares_launches(device: torch.device) -> bool:
    """Whether many weights are merged in one launch there."""
    return device.type == "cuda"


def _product(layer: Any, adapter: str) -> tuple[Tensor, Tensor] | None:
    """The two matrices whose product the adapter adds; None if only the layer can compute it."""
    if isinstance(layer.base_layer, nn.Linear):
        return layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
    if isinstance(layer.base_layer, nn.Embedding):
        return layer.lora_embedding_A[adapter].mT, layer.lora_embedding_B[adapter].mT
    return None


def _weights(layers: Mapping[str, nn.Module]) -> Iterator[_Weight]:
    """Yield every weight, unmerged."""
    for name, module in layers.items():
        base = getattr(module, "base_layer", None) if _is_adapted(module) else module
        assert isinstance(base, nn.Module), f"{name=}"
        keys = [key for key, value in base._parameters.items() if value is not None]
        unsaved = base._non_persistent_buffers_set
        keys += [key for key, value in base._buffers.items() if value is not None and key not in unsaved]
        for key in keys:
            yield _Weight(name=strip_wrappers(f"{name}.{key}" if name else key), module=base, key=key, layer=module)


def _layers(module: Any, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that holds weights, under its name without adapters."""
    if _has(module, "modules_to_save") and _has(module, "original_module"):
        active = module.active_adapters[0] if module.active_adapters else None
        saved = module.modules_to_save
        is_trained = active is not None and active in saved and not getattr(module, "disable_adapters", False)
        yield from _layers(saved[active] if is_trained else module.original_module, name)
        return
    yield name, module
    if _is_adapted(module):
        return
    for key, child in module.named_children():
        yield from _layers(child, f"{name}.{key}" if name else key)


def _is_adapted(module: nn.Module) -> bool:
    return _has(module, "base_layer") and _has(module, "lora_A")


def _has(module: nn.Module, name: str) -> bool:
    """Whether a module has a submodule of that name. `hasattr` takes 2 us for one that it has not."""
    return name in module._modules


def _active(layer: Any) -> list[str]:
    """Adapters that the layer applies and that are not merged into its weight."""
    if layer.disable_adapters:
        return []
    adapters = [*layer.lora_A, *getattr(layer, "lora_embedding_A", ())]
    return [each for each in layer.active_adapters if each in adapters and each not in layer.merged_adapters]


def _problems(layers: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    for name, layer in layers.items():
        if not _is_adapted(layer):
            if _has(layer, "base_layer"):
                yield name, f"is adapted by {type(layer).__name__}, which is not a LoRA that fp8refit can merge"
            continue
        if any(True for _ in layer.base_layer.children()):  # type: ignore[union-attr]
            yield name, f"is adapted by {type(layer).__name__}, around a layer with sublayers"
        for adapter in _active(layer):
            variants = getattr(layer, "lora_variant", {})
            if adapter in variants or getattr(layer, "use_dora", {}).get(adapter):
                yield name, "has an adapter that is more than a product of two matrices"
            elif getattr(layer, "lora_bias", {}).get(adapter):
                yield name, "has an adapter with a bias"
