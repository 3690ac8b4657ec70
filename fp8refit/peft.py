"""The policy of a model with LoRA adapters: whole weights, merged one at a time.

The model is not changed. This module reads the layers of the `peft` library without importing it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.errors import InvalidSourceError
from fp8refit.fill.kernels.merge import add_product
from fp8refit.live.names import strip_wrappers
from fp8refit.live.slots import TensorMeta
from fp8refit.live.storage import why_unreadable
from fp8refit.sources.row_runs import Piece, cut


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
        self._layers = layers

    def scan(self) -> tuple[dict[str, TensorMeta], tuple[str, ...]]:
        """Read names, shapes and dtypes, without merging anything."""
        problems = {each.name: why_unreadable(each.value) for each in self._weights()}
        metadata = {each.name: TensorMeta.of(each.value) for each in self._weights() if not problems[each.name]}
        return metadata, tuple(f"{name}: {problem}" for name, problem in problems.items() if problem)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight, merged."""
        for each in self._weights():
            yield each.name, each.merge(each.value, 0)

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        """Yield the weights in pieces. The next piece overwrites a merged one on the current stream."""
        buffer: Tensor | None = None
        for each in self._weights():
            for piece in cut(each.name, each.value, max_bytes):
                if not each.is_merged:
                    yield piece
                    continue
                rows = piece.tensor
                if buffer is None or buffer.nbytes < rows.nbytes or buffer.device != rows.device:
                    buffer = torch.empty(rows.nbytes, dtype=torch.uint8, device=rows.device)
                out = buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
                yield replace(piece, tensor=each.merge(rows, piece.first_row, out=out))

    def _weights(self) -> Iterator["_Weight"]:
        """Yield every weight once, unmerged."""
        seen: set[str] = set()
        for name, module in self._layers.items():
            base = getattr(module, "base_layer", None) if _is_adapted(module) else module
            assert isinstance(base, nn.Module), f"{name=}"
            values: dict[str, Tensor] = dict(base.named_parameters(recurse=False))
            values |= {
                key: each
                for key, each in base.named_buffers(recurse=False)
                if key not in base._non_persistent_buffers_set
            }
            for key, value in values.items():
                path = strip_wrappers(f"{name}.{key}" if name else key)
                if path in seen:
                    continue
                seen.add(path)
                adapters = tuple(_active(module)) if base is not module and key == "weight" else ()
                yield _Weight(name=path, value=value.detach(), layer=module, adapters=adapters)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Weight:
    """One weight of a layer, and the adapters to merge into it."""

    name: str
    value: Tensor
    layer: Any
    adapters: tuple[str, ...]

    @property
    def is_merged(self) -> bool:
        """Whether any adapter is added to it."""
        return bool(self.adapters)

    @torch.no_grad()
    def merge(self, rows: Tensor, first_row: int, *, out: Tensor | None = None) -> Tensor:
        """Return rows of the weight with the adapters added, in `out` or in new memory."""
        end_row = first_row + rows.shape[0]
        for adapter in self.adapters:
            out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) if out is None else out
            product = self._product(adapter)
            if product is None:
                delta = self.layer.get_delta_weight(adapter).to(rows.dtype)
                rows = torch.add(rows, delta[first_row:end_row], out=out)
            else:
                up, down = product
                rows = add_product(rows, up[first_row:end_row], down, self.layer.scaling[adapter], out=out)
        return rows

    def _product(self, adapter: str) -> tuple[Tensor, Tensor] | None:
        """The two matrices whose product the adapter adds; None if only the layer can compute it."""
        layer = self.layer
        if isinstance(layer.base_layer, nn.Linear):
            return layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
        if isinstance(layer.base_layer, nn.Embedding):
            return layer.lora_embedding_A[adapter].mT, layer.lora_embedding_B[adapter].mT
        return None


def _layers(module: Any, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that holds weights, under its name without adapters."""
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
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
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def _active(layer: Any) -> list[str]:
    """Adapters that the layer applies and that are not merged into its weight."""
    if layer.disable_adapters:
        return []
    adapters = [*layer.lora_A, *getattr(layer, "lora_embedding_A", ())]
    return [each for each in layer.active_adapters if each in adapters and each not in layer.merged_adapters]


def _problems(layers: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    for name, layer in layers.items():
        if not _is_adapted(layer):
            if hasattr(layer, "base_layer"):
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
