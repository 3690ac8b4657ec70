"""The model that drafts tokens for a vLLM engine, and what its checkpoint holds."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from fp8refit.errors import InvalidSourceError
from fp8refit.live.drafts import named_apart
from fp8refit.live.names import is_not_a_weight
from fp8refit.live.slots import SCALE_SUFFIX, Inventory, Refusal, TensorMeta
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.tracing.inventory import inventory_of
from fp8refit.tracing.twin import Naming, Twin, named_tensors
from fp8refit_vllm.layout import VllmRules

NAME = "draft."
"""Begins the names of a draft that has a checkpoint of its own."""
_OWN_METHOD = "draft_model"
_TABLES = frozenset((torch.int64, torch.bool))


class Draft:
    """A model that drafts tokens.

    Attributes:
        network: The live model.
        config: The `VllmConfig` with which vLLM built it.
        model_config: Its part of that.
        prefix: Of the names of its layers.
        is_apart: Whether its checkpoint is another than the target's.
    """

    def __init__(self, network: nn.Module, config: Any, model_config: Any, *, prefix: str, is_apart: bool) -> None:
        self.network, self.config, self.model_config = network, config, model_config
        self.prefix, self.is_apart = prefix, is_apart

    @cached_property
    def stored(self) -> Mapping[str, TensorMeta]:
        """What its checkpoint holds, as the files say: transformers knows no layers that draft tokens.

        Raises:
            InvalidSourceError: There is no checkpoint of safetensors.
        """
        metadata = SafetensorsSource(_folder_of(self.model_config)).metadata
        return {name: meta for name, meta in metadata.items() if not name.endswith(SCALE_SUFFIX)}

    @property
    def naming(self) -> Naming | Refusal:
        """What its loader may take; a refusal if that is unknown."""
        try:
            weights = {name: meta for name, meta in self.stored.items() if not is_not_a_weight(name)}
        except (InvalidSourceError, OSError, ValueError) as error:
            return self._refusal(f"has weights whose names are unknown ({error})")
        tables = {name for name, meta in weights.items() if meta.dtype in _TABLES}
        packed = [name for name, meta in weights.items() if not meta.dtype.is_floating_point and name not in tables]
        if packed:
            return self._refusal(f"has packed weights in its checkpoint, such as {packed[0]}")
        return Naming(tensors={name: meta for name, meta in weights.items() if name not in tables})

    def _refusal(self, reason: str) -> Refusal:
        remedy = "Boot it from a BF16 or FP8 checkpoint of safetensors, which stays where it is, or without speculative_config"
        return Refusal(module=type(self.network).__name__, reason=reason, remedy=remedy)


def draft_of(worker: Any) -> Draft | None:
    """The draft of this worker; None if it has none, or has one that is no model."""
    config, runner = worker.vllm_config, worker.model_runner
    proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    network = getattr(proposer, "model", None)
    if config.speculative_config is None or not (isinstance(network, nn.Module) and hasattr(network, "load_weights")):
        return None
    model_config = config.speculative_config.draft_model_config
    make = getattr(proposer, "_create_draft_vllm_config", None)
    return Draft(
        network,
        config if make is None else make(),
        model_config,
        prefix=_OWN_METHOD if config.speculative_config.method == _OWN_METHOD else "",
        is_apart=model_config.model != config.model_config.model,
    )


def read_draft(
    draft: Draft, twin: Twin | Refusal, network: nn.Module, target: Inventory, *, has_noise: bool
) -> tuple[Inventory, dict[str, str]]:
    """What a refit writes of a draft alone; and what its checkpoint calls tensors that it has of the target, with their names
    there.

    Args:
        draft: The draft.
        twin: The trace of its loader, or why there is none.
        network: The target.
        target: What a refit writes of it.
        has_noise: Whether the engine was booted with dummy weights.
    """
    of_target = {slot.weight.untyped_storage()._cdata: slot.name for slot in target.slots}
    rules, shared = _Rules(of_target.keys()), dict[str, str]()
    if isinstance(twin, Refusal):
        return inventory_of(draft.network, rules, twin), shared
    held = ((name, of_target.get(tensor.untyped_storage()._cdata)) for name, tensor in named_tensors(draft.network))
    names = {name: found for name, found in held if found is not None and name in twin.firsts}
    shared = {copy.source: names[copy.parameter] for copy in twin.traced.copies if copy.parameter in names}
    own = inventory_of(draft.network, rules, twin.without(names), has_noise=has_noise, apart=(network,))
    own = replace(own, unneeded=(*own.unneeded, *(draft.stored.keys() - twin.naming.tensors.keys())))
    if draft.is_apart:
        return named_apart(own, NAME), {NAME + name: first for name, first in shared.items()}
    return own, {name: first for name, first in shared.items() if name != first}


class _Rules(VllmRules):
    """Those of a draft, which leaves the target's weights to the target, and may hold all of its own as its checkpoint does."""

    no_block_fp8: str | None = None

    def __init__(self, storages: Collection[int]) -> None:
        self._storages = storages

    @override
    def kept(self, module: nn.Module) -> Collection[str]:
        """Also tables of token ids, which come with its checkpoint and are not trained."""
        own = ((key, held) for key, held in module._parameters.items() if held is not None)
        others = [key for key, held in own if held.dtype in _TABLES or held.untyped_storage()._cdata in self._storages]
        return [*super().kept(module), *others]


def _folder_of(model_config: Any) -> Path:
    if Path(model_config.model).is_dir():
        return Path(model_config.model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
