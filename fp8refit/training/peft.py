"""The policy of a model with LoRA adapters: whole weights, merged one at a time.

The model is not changed. This module reads the layers of the `peft` library without importing it.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from typing_extensions import override

from fp8refit.errors import InvalidSourceError
from fp8refit.kernels.merge import Product, add_products
from fp8refit.kernels.products import LowRank, fits
from fp8refit.live.layout_guard import LayoutGuard
from fp8refit.live.names import strip_wrappers
from fp8refit.live.slots import TensorMeta
from fp8refit.live.storage import why_unreadable
from fp8refit.sources.recipe_batches import ScratchBuffer, in_batches
from fp8refit.sources.row_runs import Piece, Recipe, cut


def merged(model: nn.Module) -> "Merged":
    """Return a source with every weight of a model under its checkpoint name, its active LoRA adapters merged: `W + s B A`.

    Weights are merged each time they are read, in the dtype of `W`: products are summed in fp32 and rounded once. A refit
    merges while it quantizes. Where it cannot, it needs memory for one merged weight or one bucket. DoRA is merged by
    `peft`, which takes memory for two weights more. Iterating yields each weight as a new tensor. Modules that are trained
    whole (`modules_to_save`) come as trained. Adapters that are already merged or disabled are not applied.

    Args:
        model: A `PeftModel`, or any model with `peft` layers.

    Raises:
        InvalidSourceError: An adapter is neither `s B A` nor DoRA, or changes one of two tied weights. Raised at once, naming
            every such layer.

    Examples:
        >>> refitter.refit(merged(model))                           # doctest: +SKIP
    """
    weights: dict[str, _Weight] = {}
    problems: list[str] = []
    for name, layer in _layers(model):
        if "base_layer" in layer._modules:
            problems += [f"{name}: {why}; {_REMEDY}" for why in _problems(layer)]
        for weight in _weights(name, layer):
            weights.setdefault(weight.name, weight)
    problems += _untied(weights.values())
    if problems:
        raise InvalidSourceError(problems)
    return Merged(model, weights.values())


_REMEDY = "call model.merge_adapter(), refit(merged(model)), and model.unmerge_adapter()"
_layouts: WeakKeyDictionary[nn.Module, tuple[LayoutGuard, dict[str, TensorMeta]]] = WeakKeyDictionary()
"""For each model that is still alive, the layout of its weights at the last scan if all could be read. Holds no weight."""


class Merged:
    """The weights that `merged` returns, as an `fp8refit.sources.source.Source`."""

    is_repeatable = True

    def __init__(self, model: nn.Module, weights: Iterable["_Weight"]) -> None:
        self._model, self._weights = model, tuple(weights)

    def scan(self) -> tuple[dict[str, TensorMeta], tuple[str, ...]]:
        """Read names, shapes and dtypes, without merging anything."""
        products = [(weight, each) for weight in self._weights if weight.layer for each in weight.products]
        names = [weight.name for weight in self._weights] + [weight.name for weight, _ in products for _ in range(2)]
        tensors = [weight.value for weight in self._weights]
        tensors += [matrix for _, each in products for matrix in (each.up, each.down)]
        known = _layouts.get(self._model)
        if known is not None and known[0].holds(names, tensors):
            return known[1], ()
        problems = {weight.name: why for weight in self._weights if (why := why_unreadable(weight.value))}
        metadata = {each.name: TensorMeta.of(each.value) for each in self._weights if each.name not in problems}
        for weight, product in products:
            if weight.name in metadata and (why := _why_not_added(weight.value, product)):
                problems[weight.name] = why
        if not problems:
            _layouts[self._model] = LayoutGuard(names, tensors), metadata
        return metadata, tuple(f"{name}: {why}" for name, why in problems.items())

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

    def pick(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the weights with these names, merged."""
        wanted = set(names)
        return dict(Merged(self._model, [each for each in self._weights if each.name in wanted]))

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        """Yield the weights in pieces, each of which stays valid until the next one is requested."""
        for batch in in_batches(self, self.recipes(max_bytes), ScratchBuffer(max_bytes)):
            yield from batch

    def recipes(self, max_bytes: int) -> Iterator[Piece | Recipe]:
        """Yield every weight as a piece, or, if adapters are merged into it, as a recipe for one."""
        for weight in self._weights:
            value, adapters = weight.value, weight.adapters
            if adapters:
                shape = tuple(value.shape)
                recipe = _Rows(
                    name=weight.name, first_row=0, tensor=value, full_shape=shape, weight=weight, adapters=adapters
                )
                yield from recipe.cut(max_bytes)
            else:
                yield from cut(weight.name, value.detach(), max_bytes)

    def make(self, recipes: Sequence[Recipe], outs: Sequence[Tensor]) -> None:
        """Merge rows: one launch adds the first adapter of every weight, the next one the second, and so on."""
        rows = [(each, out) for each, out in zip(recipes, outs, strict=True) if isinstance(each, _Rows)]
        number = 0
        while rows:
            products = [each.add(number, out) for each, out in rows]
            add_products([product for product in products if product is not None])
            number += 1
            rows = [(each, out) for each, out in rows if number < len(each.adapters)]


@dataclass(slots=True, eq=False)
class _Weight:
    """One weight of a layer."""

    name: str
    module: nn.Module
    """The module that holds it."""
    key: str
    """Its name there."""
    layer: Any
    """The LoRA layer that wraps that module, if there is one. Its adapters may be inactive."""

    @property
    def value(self) -> Tensor:
        """The weight, not merged."""
        module, key = self.module, self.key
        value = module._parameters[key] if key in module._parameters else module._buffers[key]
        assert value is not None, f"{self.name=}"
        return value

    @property
    def adapters(self) -> Sequence[str]:
        """The adapters to add to it."""
        return _active(self.layer) if self.layer is not None else ()

    def product(self, adapter: str) -> LowRank | None:
        """The product that an adapter adds; None if only the layer can compute it."""
        layer, held = self.layer, self.layer._modules
        if self.dora(adapter) is not None:
            return None
        if isinstance(self.module, nn.Linear):
            up, down = _weight_of(held["lora_B"]._modules[adapter]), _weight_of(held["lora_A"]._modules[adapter])
        elif isinstance(self.module, nn.Embedding):
            up, down = held["lora_embedding_A"][adapter].mT, held["lora_embedding_B"][adapter].mT
        else:
            return None
        return LowRank(up, down, layer.scaling[adapter])

    def dora(self, adapter: str) -> Any:
        """What computes the merged weight, if the adapter is DoRA."""
        return _option(self.layer, "lora_variant").get(adapter)

    @property
    def products(self) -> Sequence[LowRank]:
        """The products to add to it, without those that only its layer can compute."""
        return [product for adapter in self.adapters if (product := self.product(adapter)) is not None]

    @property
    def added(self) -> set[tuple[int, int]]:
        """Where the matrices lie that are added to it; also of adapters that only its layer can add."""
        found = {adapter: self.product(adapter) for adapter in self.adapters}
        return {
            (each.up.data_ptr(), each.down.data_ptr()) if each is not None else (id(self), 0) for each in found.values()
        }


@dataclass(kw_only=True, slots=True, eq=False)
class _Rows(Recipe):
    """Rows of a weight, and the adapters to add to them."""

    weight: _Weight
    adapters: Sequence[str]

    @property
    @override
    def product(self) -> LowRank | None:
        if len(self.adapters) > 1 or not self.is_whole:
            return None
        return self.weight.product(self.adapters[0])

    def add(self, number: int, out: Tensor) -> Product | None:
        """Return the product that adds adapter `number` and writes the sum to `out`, where the sum of the earlier ones is.

        None if the layer had to compute it: then `out` is already written.
        """
        rows, adapter = self.tensor if number == 0 else out, self.adapters[number]
        product = self.weight.product(adapter)
        if product is None:
            layer, dora = self.weight.layer, self.weight.dora(adapter)
            with torch.no_grad():
                if dora is not None:
                    merged = dora.merge_safe(layer, adapter, self.weight.value)
                    out.copy_(merged[self.first_row : self.first_row + rows.shape[0]])
                else:
                    delta = layer.get_delta_weight(adapter)
                    torch.add(rows, delta[self.first_row : self.first_row + rows.shape[0]], out=out)
            return None
        up = product.up if self.is_whole else product.up[self.first_row : self.first_row + rows.shape[0]]
        return Product(weight=rows, up=up, down=product.down, scale=product.scale, out=out)


def _why_not_added(weight: Tensor, product: LowRank) -> str | None:
    """Say why a product cannot be added to a weight that can be read; None if it can."""
    for matrix in (product.up, product.down):
        why = why_unreadable(matrix)
        if why is not None:
            return f"a matrix of its adapter {why}"
        if matrix.device != weight.device:
            return f"a matrix of its adapter is on {matrix.device}, and the weight on {weight.device}; move one of them"
    if not fits(weight, product.up, product.down):
        shapes = f"{list(product.up.shape)} and {list(product.down.shape)}"
        return f"its adapter has matrices of shapes {shapes}, which do not fit the weight's {list(weight.shape)}"
    return None


def _untied(weights: Iterable[_Weight]) -> Iterator[str]:
    """Yield why a parameter that the model holds under several names would differ between them."""
    firsts: dict[int, _Weight] = {}
    for weight in weights:
        first = firsts.setdefault(id(weight.value), weight)
        if first is not weight and first.added != weight.added and not _are_equal(first, weight):
            yield (
                f"{weight.name}: is tied to {first.name}, but their adapters differ, and an engine holds one tensor for both; "
                "adapt both alike: LoraConfig(ensure_weight_tying=True), and get_peft_model(autocast_adapter_dtype=False), "
                "else peft gives them copies"
            )


def _are_equal(one: _Weight, other: _Weight) -> bool:
    """Whether the same is added to two weights, from matrices in different places."""
    products = one.products, other.products
    return (
        {*map(len, products)} == {len(one.adapters)} == {len(other.adapters)}
        and [each.scale for each in products[0]] == [each.scale for each in products[1]]
        and all(
            torch.equal(first, second.to(first.device))
            for each, its in zip(*products, strict=True)
            for first, second in ((each.up, its.up), (each.down, its.down))
        )
    )


def _weight_of(linear: Any) -> Tensor:
    """Return `linear.weight`. Reading a plain parameter directly saves a microsecond."""
    weight: Tensor | None = linear._parameters.get("weight")
    return weight if weight is not None else linear.weight


def _weights(name: str, layer: Any) -> Iterator[_Weight]:
    """Yield every weight of a layer, unmerged."""
    held = layer._modules
    is_adapted = "base_layer" in held and "lora_A" in held
    if "base_layer" in held and not is_adapted:
        return  # the layer in it is another one here
    base = held["base_layer"] if is_adapted else layer
    adapted = vars(layer).get("parameter_name", "weight")
    keys = [key for key, value in base._parameters.items() if value is not None]
    if base._buffers:
        unsaved = base._non_persistent_buffers_set
        keys += [key for key, value in base._buffers.items() if value is not None and key not in unsaved]
    for key in keys:
        full_name = strip_wrappers(f"{name}.{key}" if name else key)
        yield _Weight(full_name, base, key, layer if is_adapted and key == adapted else None)


def _layers(module: Any, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that holds weights or adapters, under its name in the model without adapters."""
    todo = [(name, module)]
    while todo:
        name, module = todo.pop()
        held = module._modules
        if "modules_to_save" in held and "original_module" in held:
            todo.append((name, _saved(module)))
            continue
        if module._parameters or module._buffers or "base_layer" in held:
            yield name, module
        if "base_layer" in held and not _is_adapted(module):
            todo.append((name, held["base_layer"]))  # what else it holds is its adapter's
        elif held and not _is_adapted(module):
            prefix = f"{name}." if name else ""
            todo += [(prefix + key, child) for key, child in reversed(held.items()) if child is not None]


def _saved(module: Any) -> nn.Module:
    """Return the module that a `modules_to_save` wrapper uses now: the trained copy, or the original."""
    active = module.active_adapters[0] if module.active_adapters else None
    saved = module.modules_to_save
    is_trained = active is not None and active in saved and not getattr(module, "disable_adapters", False)
    found: nn.Module = saved[active] if is_trained else module.original_module
    return found


def _is_adapted(module: nn.Module) -> bool:
    return "base_layer" in module._modules and "lora_A" in module._modules


def _active(layer: Any) -> list[str]:
    """Adapters that the layer applies and that are not merged into its weight."""
    if layer.disable_adapters:
        return []
    held, merged = layer._modules, layer.merged_adapters
    linear, embedding = held["lora_A"], held.get("lora_embedding_A", ())
    return [each for each in layer.active_adapters if (each in linear or each in embedding) and each not in merged]


def _problems(layer: Any) -> Iterator[str]:
    """Yield why a layer that wraps another one cannot be merged."""
    if not _is_adapted(layer):
        if not getattr(layer, "merged", False):
            yield f"is adapted by {type(layer).__module__}.{type(layer).__qualname__}, which is no LoRA"
        return
    inner = [child for child in layer._modules["base_layer"]._modules.values() if child is not None]
    if any(each._parameters or each._buffers for child in inner for each in child.modules()):
        yield f"is adapted by {type(layer).__name__}, around a layer with sublayers that hold weights"
    variants, doras, biases = (_option(layer, name) for name in ("lora_variant", "use_dora", "lora_bias"))
    if not (variants or True in doras.values() or True in biases.values()):
        return  # the usual case; finding the active adapters would take longer
    active = _active(layer)
    for adapter in active:
        if doras.get(adapter) and adapter in variants and len(active) == 1:
            continue
        if adapter in variants or doras.get(adapter):
            yield "has an adapter that is more than a product of two matrices"
        elif biases.get(adapter):
            yield "has an adapter with a bias"


def _option(layer: Any, name: str) -> Mapping[str, Any]:
    """Return a layer's setting for each adapter; empty if its `peft` is too old to have it.

    Not by `getattr` alone, which takes 2 us on a module that lacks the attribute.
    """
    held = vars(layer)
    if name in held:
        return held[name]  # type: ignore[no-any-return]
    return getattr(layer, name) if hasattr(type(layer), name) or name in layer._modules else {}
