"""The model that drafts tokens for a vLLM engine, and what its checkpoint holds."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fp8refit.errors import InvalidSourceError
from fp8refit.fill.plan import is_any_of
from fp8refit.live.drafts import DRAFT, named_apart
from fp8refit.live.names import is_kv_scale, is_not_a_weight
from fp8refit.live.slots import SCALE_SUFFIX, Inventory, Refresh, Refusal, TensorMeta
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.tracing.inventory import inventory_of
from fp8refit.tracing.twin import Naming, Twin, named_tensors
from fp8refit_vllm.activations import as_booted, read_activation_scales, restore_activation_scales
from fp8refit_vllm.compat import has_dummy_weights
from fp8refit_vllm.layout import VllmRules

_OWN_METHOD = "draft_model"
_TABLES = frozenset((torch.int64, torch.bool))
"""dtypes of tables of token ids."""
_BOOT = "Boot it from a BF16 or FP8 checkpoint of safetensors, which stays where it is, or without speculative_config"


class Draft:
    """A model that drafts tokens.

    Args:
        network: The live model.
        proposer: What vLLM drives it with.
        config: The worker's `VllmConfig`.

    Attributes:
        network: The live model.
        model_config: Its part of vLLM's configuration.
        is_plain: Whether it is a model of its own kind, not made for a target.
        is_apart: Whether its checkpoint is another than the target's.
        prefix: Of the names of its layers.
    """

    def __init__(self, network: nn.Module, proposer: Any, config: Any) -> None:
        self.network, self._proposer, self._config = network, proposer, config
        self.model_config = config.speculative_config.draft_model_config
        self.is_plain = config.speculative_config.method == _OWN_METHOD
        stored, of_target = ((each.model, each.revision) for each in (self.model_config, config.model_config))
        self.is_apart = self.is_plain or stored != of_target
        self.prefix = _OWN_METHOD if self.is_plain else ""

    @cached_property
    def config(self) -> Any:
        """The `VllmConfig` with which vLLM built it."""
        make = getattr(self._proposer, "_create_draft_vllm_config", None)
        return make() if make is not None else getattr(self._proposer, "_draft_vllm_config", None) or self._config

    @property
    def refusals(self) -> Iterator[Refusal]:
        """Why it cannot be refitted, before anything of it is read."""
        own = getattr(self._config.speculative_config, "draft_load_config", None)
        if has_dummy_weights(own or self._config.load_config):
            yield self._refusal("was booted with dummy weights, and some of what its checkpoint has is never sent")
        cached = str(getattr(self._config.cache_config, "cache_dtype", "auto"))
        if cached.startswith("fp8") and getattr(self._config.model_config, "enable_sleep_mode", False):
            yield self._refusal("has an FP8 KV cache, whose scales a deep sleep would lose")

    @cached_property
    def stored(self) -> Mapping[str, TensorMeta]:
        """What its checkpoint holds, as the files say: transformers knows no layers that draft tokens.

        Raises:
            InvalidSourceError: There is no checkpoint of safetensors.
        """
        source = SafetensorsSource(_folder_of(self.model_config, self._config.load_config))
        return {name: meta for name, meta in source.metadata.items() if not name.endswith(SCALE_SUFFIX)}

    def naming(self, beside: Sequence[str]) -> Naming | Refusal:
        """What its loader may take; a refusal if that is unknown.

        Args:
            beside: Patterns of what the target's checkpoints hold beside the target.
        """
        try:
            stored = self.stored
        except (InvalidSourceError, OSError, ValueError) as error:
            return self._refusal(f"has weights whose names are unknown ({error})")
        is_own = self.owns(beside)
        weights = {name: m for name, m in stored.items() if not (is_not_a_weight(name) or is_kv_scale(name))}
        odd = {name for name, meta in weights.items() if not meta.dtype.is_floating_point}
        if packed := [name for name in odd if is_own(name) and weights[name].dtype not in _TABLES]:
            return self._refusal(f"has packed weights in its checkpoint, such as {min(packed)}")
        return Naming(tensors={name: meta for name, meta in weights.items() if name not in odd})

    def owns(self, beside: Sequence[str]) -> Callable[[str], bool]:
        """A function that tells whether a name of its checkpoint is its own, not the target's. See `naming`."""
        return (lambda _: True) if self.is_apart else is_any_of(beside)

    def _refusal(self, reason: str) -> Refusal:
        return Refusal(module=type(self.network).__name__, reason=reason, remedy=_BOOT)


def draft_of(worker: Any) -> Draft | None:
    """The draft of this worker; None if it has none, or has one that is no model."""
    config, runner = worker.vllm_config, worker.model_runner
    proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    network = getattr(proposer, "model", None)
    if config.speculative_config is None or not (isinstance(network, nn.Module) and hasattr(network, "load_weights")):
        return None
    return Draft(network, proposer, config)


def read_boot_values(worker: Any) -> dict[str, Tensor]:
    """Copy what no policy brings to a draft, before the engine can sleep, which loses it."""
    draft = draft_of(worker)
    if draft is None or any(draft.refusals):
        return {}
    tables = {name: tensor.detach().clone() for name, tensor in _tables_of(draft.network)}
    return tables | read_activation_scales(draft.network)


def read_draft(
    draft: Draft, twin: Twin | Refusal, network: nn.Module, target: Inventory, values: Mapping[str, Tensor]
) -> tuple[Inventory, dict[str, str]]:
    """What a refit writes of a draft alone; and what its checkpoint calls tensors that it has of the target, with their names
    there.

    Args:
        draft: The draft.
        twin: The trace of its loader, or why there is none.
        network: The target.
        target: What a refit writes of it.
        values: What `read_boot_values` gave at boot.
    """
    of_target = {slot.weight.untyped_storage()._cdata: slot.name for slot in target.slots}
    rules, shared = _Rules(of_target.keys()), dict[str, str]()
    if isinstance(twin, Refusal):
        return inventory_of(draft.network, rules, twin), shared
    held = ((name, of_target.get(tensor.untyped_storage()._cdata)) for name, tensor in named_tensors(draft.network))
    names = {name: found for name, found in held if found is not None and name in twin.firsts}
    shared = {copy.source: names[copy.parameter] for copy in twin.traced.copies if copy.parameter in names}
    own = inventory_of(draft.network, rules, twin.without(names), apart=(network,))
    restored, without = restore_activation_scales(draft.network, values)
    tables, unknown = _restore_tables(draft.network, values)
    stored = {} if draft.is_plain else draft.stored  # the trace has found the files of any other
    never_sent = [name for name, meta in stored.items() if meta.dtype in _TABLES or is_kv_scale(name)]
    own = replace(
        own,
        unneeded=(*own.unneeded, *never_sent),
        refreshes=(*own.refreshes, *restored, *tables),
        refusals=(*own.refusals, *draft.refusals, *without, *unknown),
    )
    if draft.is_apart:
        return named_apart(own, DRAFT), {DRAFT + name: first for name, first in shared.items()}
    return own, {name: first for name, first in shared.items() if name != first}


class _Rules(VllmRules):
    """Those of a draft, which leaves the target's weights to the target, and may hold all of its own as its checkpoint does."""

    no_block_fp8: str | None = None

    def __init__(self, storages: Collection[int]) -> None:
        self._storages = storages

    @override
    def kept(self, module: nn.Module) -> Collection[str]:
        """Also tables of token ids."""
        own = ((key, held) for key, held in module._parameters.items() if held is not None)
        others = [key for key, held in own if held.dtype in _TABLES or held.untyped_storage()._cdata in self._storages]
        return [*super().kept(module), *others]


def _tables_of(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, each) for name, each in network.named_parameters() if each.dtype in _TABLES)


def _restore_tables(
    network: nn.Module, values: Mapping[str, Tensor]
) -> tuple[tuple[Refresh, ...], tuple[Refusal, ...]]:
    live = dict(_tables_of(network))
    if unknown := [name for name in live if name not in values]:
        reason = f"has tables of token ids ({', '.join(unknown)}) that were not read at boot"
        return (), (Refusal(module=type(network).__name__, reason=reason, remedy="Boot it with fp8refit's plugin"),)
    return ((as_booted("tables of token ids", live, values),) if live else ()), ()


def _folder_of(model_config: Any, load_config: Any) -> Path:
    if Path(model_config.model).is_dir():
        return Path(model_config.model)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    )
