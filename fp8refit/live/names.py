"""Checkpoint names: removing trainers' wrappers, and recognizing names that are not weights. Works on strings only."""

import re
from collections.abc import Iterable
from functools import lru_cache

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module|base_layer)\."
)
_PREFIXES = ("base_model.model.",)
_SCALE = re.compile(r"(?:^|\.)\w*weight_scale$")
_ADAPTER = re.compile(r"(?:^|\.)lora_\w+")
_NOT_WEIGHTS = re.compile(r"(?:^|\.)rotary_emb\.(?:inv_freq|original_inv_freq|cos_cached|sin_cached)$")

_KV_SCALE = re.compile(r"\.(?:q|k|v|kv|prob)_scale$|\.[kv]_proj\.output_scale$")

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_EXPERTS = re.compile(r"(.+\.experts)\.(?:\d+\..+|[a-z]\w*)$")


@lru_cache(maxsize=1 << 17)
def strip_wrappers(name: str) -> str:
    """Remove the prefixes of torch.compile, FSDP, DDP and PEFT, leaving the Hugging Face checkpoint name. Scales get one name,
    whatever the checkpoint's container; see `name_of_scale`.

    >>> strip_wrappers("module._orig_mod.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'

    Raises:
        UnicodeEncodeError: The name cannot be encoded as UTF-8.
    """
    name = _WRAPPERS.sub("", name)
    name.encode()
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name_of_scale(name)


def name_of_scale(name: str) -> str:
    """The name for a weight's scale that is also a block-FP8 checkpoint's: compressed-tensors and ModelOpt have another.

    >>> name_of_scale("model.layers.0.mlp.up_proj.weight_scale")
    'model.layers.0.mlp.up_proj.weight_scale_inv'
    """
    return f"{name}_inv" if _SCALE.search(name) is not None else name


def is_not_a_weight(name: str) -> bool:
    """Whether every engine recomputes this tensor, such as the rotary tables of old checkpoints."""
    return _NOT_WEIGHTS.search(name) is not None


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint tensor is a scale of an FP8 KV cache or of its attention."""
    return _KV_SCALE.search(name) is not None


def attention_name(module: str) -> str:
    """The checkpoint's name for an engine's attention module: engines wrap the operation in a module of its own.

    >>> attention_name("model.layers.0.self_attn.attn"), attention_name("model.layers.0.self_attn.mla_attn.mla_attn")
    ('model.layers.0.self_attn', 'model.layers.0.self_attn')
    """
    return module.removesuffix(".mla_attn.mla_attn").removesuffix(".attn")


def other_spellings(name: str) -> tuple[str, ...]:
    """Other names of a tensor: newer transformers rename it in state dicts, but save it under its old name.

    >>> other_spellings("model.layers.0.block_sparse_moe.gate.weight")
    ('model.layers.0.mlp.gate.weight',)
    """
    return (name.replace(".block_sparse_moe.", ".mlp."),) if ".block_sparse_moe." in name else ()


def stack_of(name: str) -> str | None:
    """The tensor that may hold all experts of a layer, in a state dict, instead of one tensor per expert.

    >>> stack_of("model.layers.0.mlp.experts.3.up_proj.weight")
    'model.layers.0.mlp.experts'
    >>> stack_of("model.layers.0.mlp.experts.gate_up_proj")
    'model.layers.0.mlp.experts'
    """
    found = _EXPERTS.match(name)
    return found[1] if found is not None else None


def without_numbers(name: str) -> str:
    """Replace layer and expert numbers, so that the same tensor of different layers gets the same name.

    >>> without_numbers("model.layers.3.mlp.experts.12.up_proj.weight")
    'model.layers.*.mlp.experts.*.up_proj.weight'
    """
    return _NUMBER.sub("*", name)


def in_one(names: Iterable[str]) -> str:
    """Combine names that differ only in numbers.

    >>> in_one(["layers.0.up_proj", "layers.1.up_proj", "layers.2.up_proj", "layers.5.up_proj"])
    'layers.{0..2,5}.up_proj'
    """
    columns = (set(parts) for parts in zip(*(name.split(".") for name in names), strict=True))
    return ".".join(next(iter(found)) if len(found) == 1 else _ranges(map(int, found)) for found in columns)


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) + "}"


def kv_scale_names(layer: str, kind: str) -> tuple[str, ...]:
    """The names checkpoints and trainers use for one scale of an attention layer, ours first."""
    parts = ("attn", f"{kind}_proj", "qkv_proj")
    names = [f"{layer}.{kind}_scale", *(f"{layer}.{part}.{kind}_scale" for part in parts)]
    if kind != "q":
        names.append(f"{layer}.{kind}_proj.output_scale")
    return tuple(names)


def is_adapter_weight(name: str) -> bool:
    """Whether a tensor belongs to a LoRA wrapper, and so is not a weight of the merged policy."""
    return _ADAPTER.search(name) is not None
