"""The tensors of a model's checkpoint and the names its state dict has for them, as transformers defines them.

transformers' own model is built on the meta device, and its own conversion from state dict to checkpoint is traced.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8refit.fill.plan import is_any_of
from fp8refit.live.names import without_numbers
from fp8refit.live.slots import Refusal, Stacked, TensorMeta
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.tracing.records import Copy
from fp8refit.tracing.trace import Trace
from fp8refit.tracing.twin import Naming, Twin
from fp8refit_transformers.layers import Saved, save_alike

_DRAFT_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""What configs call the number of layers that draft tokens."""
_LAYER = re.compile(r"(?:.+?\.)?layers\.(?=\d+\.)")


def twin_or_refusal(config: Any, trace: Callable[[], Twin | None]) -> Twin | Refusal:
    """Trace the loader of an engine's model; a refusal if that is impossible.

    Args:
        config: The model's Hugging Face config.
        trace: Calls `fp8refit.tracing.twin.trace_as_named` with `namings_of` the model.
    """
    name = ", ".join(config.architectures or ())
    try:
        twin = trace()
    except Exception as error:  # noqa: BLE001 - a model that cannot be built without memory may raise anything
        reason = f"cannot be built without memory ({type(error).__name__}: {error})"
        return Refusal(module=name, reason=reason, remedy="fp8refit does not know how to look at it yet")
    if twin is None:
        reason = "is not a class of transformers, and only transformers defines what its checkpoints hold"
        return Refusal(module=name, reason=reason, remedy="Boot a model that transformers knows")
    return twin


def plain_config(model: str, config: Any, overrides: Any, **options: Any) -> Any:
    """The Hugging Face config before an engine adapted it to its own models, if it can be read again.

    Args:
        model: Folder or name.
        config: The engine's version, returned if the original cannot be read.
        overrides: The user's overrides: values by name, or a function of the config.
        options: Options of `AutoConfig.from_pretrained`.
    """
    from transformers import AutoConfig

    try:
        plain = AutoConfig.from_pretrained(model, **options)
    except (OSError, ValueError):
        return config
    if callable(overrides):
        return overrides(plain)
    for name, value in overrides.items():
        inner: Any = getattr(plain, name, None)
        if isinstance(value, dict) and hasattr(inner, "update"):
            inner.update(value)
        else:
            setattr(plain, name, value)
    return plain


def headers_of(model: str, *, revision: str | None, cache_dir: str | None) -> Mapping[str, TensorMeta]:
    """What a checkpoint of safetensors holds, as its files say.

    Args:
        model: Folder or name.
        revision: Of a name.
        cache_dir: Where names are cached, if it is not the default.

    Raises:
        InvalidSourceError: There are no such files.
        OSError: The name is not cached.
    """
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    return SafetensorsSource(folder).metadata


def namings_of(config: Any) -> Iterator[Naming]:
    """What checkpoints of the model that `config` describes hold; nothing if transformers does not know its class.

    First the names under which transformers saves a model that it made, derived from two layers of each kind. The others are
    for loaders that raise for these, and come only if they differ: names derived from every layer, those under which
    transformers saves a model from a published checkpoint, with prefixes that it removes on loading, such as a tower's
    `vision_model`, and one name per expert, where published stacks are transposed ones (Qwen3-VL-MoE).

    Args:
        config: A Hugging Face config.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping

    model_class = _class_of(config)
    if model_class is None:
        return
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    with torch.device("meta"):
        model = model_class._from_config(plain)
    made = _naming_of(model)
    yield made
    whole = _naming_of(model, is_whole=True)
    if whole != made:
        yield whole
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    if any(type(conversion).__name__ == "PrefixChange" for conversion in conversions):
        model._weight_conversions = conversions
        published = _naming_of(model, is_whole=True)
        others = dict(zip(whole.tensors, published.tensors, strict=True))
        if any(name != other for name, other in others.items()):
            yield replace(published, aliases={**others, **published.aliases})
    if any(_has_two_orders(conversion) for conversion in conversions):
        rest = [conversion for conversion in conversions if not _has_two_orders(conversion)]
        model._weight_conversions = [*rest, *(get_checkpoint_conversion_mapping("qwen2_moe") or ())]
        single = _naming_of(model)
        yield replace(single, stacked=tuple(replace(stack, is_transposed=None) for stack in single.stacked))


def _has_two_orders(conversion: Any) -> bool:
    """Whether transformers loads a tensor as it is or transposed, whichever fits. It always saves it as it is."""
    return any(getattr(operation, "check_dims", False) for operation in getattr(conversion, "operations", ()))


def _naming_of(model: Any, *, is_whole: bool = False) -> Naming:
    """How transformers saves this model.

    Args:
        model: The model.
        is_whole: Whether to convert every layer.
    """
    state: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    firsts: dict[int, str] = {}
    for name, tensor in model.state_dict().items():
        first = firsts.setdefault(tensor.untyped_storage()._cdata, name)
        if first != name:
            tied[name] = first
            continue
        state[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    saved = None if is_whole else _save_alike(model, state)
    saved = saved if saved is not None else _save(model, state)
    aliases: dict[str, str] = {}
    stacks: dict[str, Stacked] = {}
    stacked: dict[str, dict[str, tuple[int, int]]] = {}
    for name, meta, places in saved:
        if places is None or places.source == name:
            continue
        shape = tuple(state[places.source].shape)
        if meta.shape == shape:
            aliases[places.source] = name
        elif len(shape) == 3 and len(meta.shape) == 2:
            parts = stacked.setdefault(places.source, {})
            stacks[places.source] = _with_part(places, meta.shape, shape, name, parts)
    tensors = {name: meta for name, meta, _ in saved}
    buffers = {name for name, _ in model.named_buffers()}
    prefix = f"{model.base_model_prefix}."
    others = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    return Naming(
        tensors=tensors,
        tied={second: aliases.get(first, first) for second, first in tied.items()},
        aliases=aliases,
        stacked=tuple(stacks[name] for name in state if name in stacks),
        others={other: name for other, name in others.items() if other not in tensors},
        buffers=frozenset(name for name, _, places in saved if (places.source if places else name) in buffers),
        beside=declared_beside(model, tensors),
    )


def declared_beside(model: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Patterns of names that published checkpoints hold and this model does not, such as those of layers that draft tokens.

    The config counts layers after the last one; the model's class says what else `from_pretrained` leaves out.

    Args:
        model: A model of transformers.
        names: The model's own names, none of which a pattern matches.
    """
    config = model.config.get_text_config()
    num_layers = getattr(config, "num_hidden_layers", 0)
    num_drafts = max(getattr(config, count, None) or 0 for count in _DRAFT_COUNTS)
    stacks = dict.fromkeys(found[0] for name in names if (found := _LAYER.match(name)))
    declared = [f"{stack}{num_layers + place}.*" for stack in stacks for place in range(num_drafts)]
    for regex in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ():
        stem = regex.removeprefix("^").removeprefix(r"(^|\.)").removesuffix(".*").replace("\\", "")
        if re.fullmatch(r"[\w.]+", stem) and without_numbers(stem) == stem:  # numbers are those of one published model
            declared.append(f"{stem}*" if regex.startswith("^") else f"*{stem}*")
    return tuple(pattern for pattern in declared if not any(map(is_any_of([pattern]), names)))


def _save(model: Any, state: Mapping[str, Tensor]) -> list[Saved]:
    """Convert a state dict to a checkpoint, as transformers does."""
    from transformers.core_model_loading import revert_weight_conversion

    trace = Trace()
    for name, tensor in state.items():
        trace.note(name, tensor)
    with trace:
        saved: dict[str, Tensor] = revert_weight_conversion(model, dict(state))
    places = {name: trace.places_of(tensor) for name, tensor in saved.items()}
    return [
        Saved(name, TensorMeta.of(tensor), places[name][0] if len(places[name]) == 1 else None)
        for name, tensor in saved.items()
    ]


def _save_alike(model: Any, state: Mapping[str, Tensor]) -> list[Saved] | None:
    from transformers.core_model_loading import dot_natural_key

    try:
        return save_alike(state, partial(_save, model), key=dot_natural_key)
    except Exception:  # noqa: BLE001 - a conversion may need every layer
        return None


def _with_part(
    places: Copy, part: tuple[int, ...], shape: tuple[int, ...], name: str, parts: dict[str, tuple[int, int]]
) -> Stacked:
    """Add a part to a stack of matrices, which holds the part as it is or transposed."""
    num_experts, rows, cols = shape
    is_transposed = part[1] > 1 and places.runs[-1].stride != 1
    expert, place = divmod(places.start, rows * cols)
    if is_transposed:
        rows, cols = cols, rows
    first_row = place if is_transposed else place // cols
    parts[name] = expert, first_row
    return Stacked(name=places.source, shape=(num_experts, rows, cols), parts=parts, is_transposed=is_transposed)


def _class_of(config: Any) -> Any:
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
