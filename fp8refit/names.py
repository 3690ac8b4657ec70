"""Checkpoint names: the wrappers trainers put around them, and what else is not a name of a weight. Strings only."""

import re
from collections.abc import Iterable
from functools import lru_cache

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
_PREFIXES = ("base_model.model.",)
_ADAPTER = re.compile(r"\.base_layer\.|(?:^|\.)lora_\w+")
_NOT_WEIGHTS = re.compile(r"(?:^|\.)rotary_emb\.(?:inv_freq|original_inv_freq|cos_cached|sin_cached)$")

_KV_SCALE = re.compile(r"\.(?:q|k|v|kv|prob)_scale$|\.[kv]_proj\.output_scale$")

_EXPERTS = re.compile(r"(.+\.experts)\.(?:\d+\..+|[a-z]\w*)$")


@lru_cache(maxsize=1 << 17)
def strip_wrappers(name: str) -> str:
    """Give the Hugging Face checkpoint name under the prefixes of torch.compile, FSDP, DDP and PEFT.

    >>> strip_wrappers("module._orig_mod.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'

    Raises:
        UnicodeEncodeError: It is no text that could be sent.
    """
    name = _WRAPPERS.sub("", name)
    name.encode()
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def is_not_a_weight(name: str) -> bool:
    """Whether a checkpoint tensor is one that every engine recomputes (rotary tables of old checkpoints)."""
    return _NOT_WEIGHTS.search(name) is not None


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint tensor is a scale of an FP8 KV cache, or of the attention over one."""
    return _KV_SCALE.search(name) is not None


def attention_name(module: str) -> str:
    """The checkpoint module of an engine's attention layer: engines put the operation itself into a module of its own.

    >>> attention_name("model.layers.0.self_attn.attn")
    'model.layers.0.self_attn'
    """
    return module.removesuffix(".attn")


def other_spellings(name: str) -> tuple[str, ...]:
    """What newer versions of transformers call a tensor in a state dict, and save under the name it always had.

    >>> other_spellings("model.layers.0.block_sparse_moe.gate.weight")
    ('model.layers.0.mlp.gate.weight',)
    """
    return (name.replace(".block_sparse_moe.", ".mlp."),) if ".block_sparse_moe." in name else ()


def stack_of(name: str) -> str | None:
    """The layer's tensors of all experts, in which a state dict may hold what a saved checkpoint names one by one.

    >>> stack_of("model.layers.0.mlp.experts.3.up_proj.weight")
    'model.layers.0.mlp.experts'
    >>> stack_of("model.layers.0.mlp.experts.gate_up_proj")
    'model.layers.0.mlp.experts'
    """
    found = _EXPERTS.match(name)
    return found[1] if found is not None else None


def without_numbers(name: str) -> str:
    """What names of the same tensor in other layers and experts have in common.

    >>> without_numbers("model.layers.3.mlp.experts.12.up_proj.weight")
    'model.layers.*.mlp.experts.*.up_proj.weight'
    """
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def in_one(names: Iterable[str]) -> str:
    """Names that differ in numbers alone, as one.

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
    """The names that checkpoints and trainers give one scale of an attention layer, the first one ours."""
    parts = ("attn", f"{kind}_proj", "qkv_proj")
    names = [f"{layer}.{kind}_scale", *(f"{layer}.{part}.{kind}_scale" for part in parts)]
    if kind != "q":
        names.append(f"{layer}.{kind}_proj.output_scale")
    return tuple(names)


def is_adapter_weight(name: str) -> bool:
    """Whether a tensor is of a model that LoRA wraps, and so is no weight of the merged policy."""
    return _ADAPTER.search(name) is not None
