"""Reads the slots of a live Hugging Face model: its state dict names are the checkpoint's names."""

import copy
import dataclasses
from collections.abc import Collection, Hashable, Iterator

import torch
from torch import Tensor, nn

from fp8refit.live.copies import Copies, values_of
from fp8refit.live.names import attention_name, strip_wrappers
from fp8refit.live.parameters import LiveTensor, live_tensors
from fp8refit.live.slots import SCALE_SUFFIX, Inventory, KvCache, KvLayer, KvScale, Refusal, Slot
from fp8refit.tracing.twin import EmptyOnMeta
from fp8refit_transformers.admission import own_class
from fp8refit_transformers.kv_cache import DTYPE, KINDS, Fp8Kv, fp8_kvs
from fp8refit_transformers.linear import BlockFp8Linear
from fp8refit_transformers.naming import declared_beside
from fp8refit_transformers.prefill import DecoderPrefill


def read_inventory(model: nn.Module) -> Inventory:
    """List a slot for every floating-point tensor of the model's state dict.

    Tied tensors share the slot of the first name. Integer buffers have no slot, since no optimizer changes them.
    """
    slots: list[Slot] = []
    aliases: dict[str, str] = {}
    unneeded: list[str] = []
    first_names: dict[Hashable, str] = {}
    for name, tensor in _state(model):
        checkpoint_name = strip_wrappers(name)
        slot = _slot(model, name, tensor)
        first = first_names.setdefault(_place(slot), checkpoint_name) if tensor.numel() else checkpoint_name
        if not tensor.is_floating_point():
            unneeded.append(checkpoint_name)
        elif first != checkpoint_name:
            aliases[checkpoint_name] = first
        else:
            slots.append(slot)
    if hasattr(model, "config"):
        unneeded += declared_beside(model, [slot.name for slot in slots])
    inventory = Inventory(
        slots=tuple(slots),
        aliases=aliases,
        unneeded=tuple(unneeded),
        live=tuple(_live(model)),
        kv=_kv_cache(model),
    )
    return dataclasses.replace(
        inventory, find_copies=Copies(model, inventory, built=_built_values(model), kept=_kept).refusals
    )


def _built_values(model: nn.Module) -> dict[str, Tensor]:
    """What a model of this class and config holds that has no weights; nothing if it has no config."""
    if not hasattr(model, "config"):
        return {}
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(getattr(model, "dtype", dtype))
        with EmptyOnMeta():
            return values_of(own_class(model)(copy.deepcopy(model.config)))
    finally:
        torch.set_default_dtype(dtype)


def _kept(module: nn.Module) -> Collection[str]:
    """KV scales, which are set apart; integers of the state dict, which no optimizer changes; and the frequencies of rotary
    embeddings, which may depend on the longest sequence.
    """
    if isinstance(module, Fp8Kv):
        return [f"{kind}_scale" for kind in KINDS]
    saved = {key: module._buffers[key] for key in module._buffers.keys() - module._non_persistent_buffers_set}
    integers = [key for key, each in saved.items() if each is not None and not each.dtype.is_floating_point]
    has_rope = hasattr(module, "rope_type")
    return integers + [key for key in (*vars(module), *module._buffers) if has_rope and key.endswith("inv_freq")]


def _kv_cache(model: nn.Module) -> KvCache:
    """The scales of the model's FP8 KV cache, or how to get one."""
    backend = str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
    layers = tuple(
        KvLayer(
            name=attention_name(strip_wrappers(name)),
            scales=tuple(KvScale(kind=kind, tensor=kv.get_buffer(f"{kind}_scale")) for kind in KINDS),
        )
        for name, kv in fp8_kvs(model)
    )
    if layers:
        return KvCache(dtype=DTYPE, backend=backend, layers=layers, prefill=DecoderPrefill(model))
    refusal = Refusal(
        module="KV cache",
        reason="the KV cache has the model's own dtype, which needs no scales",
        remedy='For one in FP8: to_block_fp8(model, kv_cache_dtype="fp8")',
    )
    return KvCache(dtype="auto", backend=backend, refusals=(refusal,))


def _live(model: nn.Module) -> Iterator[LiveTensor]:
    """Everything that must stay in place. A forward may replace other buffers, such as length-dependent RoPE
    frequencies.
    """
    passing = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        if not isinstance(module, Fp8Kv)
        for key in module._non_persistent_buffers_set
    }
    return (live for live in live_tensors(model) if live.name not in passing)


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint of the model, except block scales."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and not name.endswith(SCALE_SUFFIX):
            yield name, tensor


def _place(slot: Slot) -> Hashable:
    """Identifies a tensor's memory. Names with equal places are tied; tied weights with separate scales are not."""
    parts = (slot.weight, slot.scale)
    return tuple((part.data_ptr(), part.shape, part.stride(), part.dtype) for part in parts if part is not None)


def _slot(model: nn.Module, name: str, tensor: Tensor) -> Slot:
    module, _, key = name.rpartition(".")
    owner = model.get_submodule(module)
    place = Slot(
        name=strip_wrappers(name),
        full_shape=tuple(tensor.shape),
        weight=tensor,
        module=module,
        kernel=own_class(owner).__name__,
    )
    if not isinstance(owner, BlockFp8Linear) or key != "weight":
        return place
    return dataclasses.replace(
        place,
        scale=owner.weight_scale_inv.detach(),
        format=owner.format,
    )
