"""The model that drafts tokens for a vLLM engine, and what vLLM keeps of it that no policy brings."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from fp8refit_transformers.naming import headers_of
from torch import Tensor, nn

from fp8refit.live.slots import Inventory, Refresh, Refusal
from fp8refit.tracing.drafts import TABLES, DraftModel, inventory_of_draft
from fp8refit.tracing.twin import Twin
from fp8refit_vllm.activations import as_booted, read_activation_scales, restore_activation_scales
from fp8refit_vllm.compat import has_dummy_weights
from fp8refit_vllm.layout import VllmRules

_OWN_METHOD = "draft_model"
_BOOT = "Boot it from a BF16 or FP8 checkpoint of safetensors, and leave that in place, or without speculative_config"


class Draft(DraftModel):
    """A model that drafts tokens.

    Args:
        network: The live model.
        proposer: What vLLM drives it with.
        config: The worker's `VllmConfig`.

    Attributes:
        model_config: Its part of vLLM's configuration.
        prefix: Of the names of its layers.
    """

    def __init__(self, network: nn.Module, proposer: Any, config: Any) -> None:
        self._proposer, self._config = proposer, config
        speculative, of_target, loading = config.speculative_config, config.model_config, config.load_config
        self.model_config = own = speculative.draft_model_config
        is_cache_fp8 = str(getattr(config.cache_config, "cache_dtype", "auto")).startswith("fp8")
        loses_scales = is_cache_fp8 and getattr(of_target, "enable_sleep_mode", False)
        super().__init__(
            network,
            partial(headers_of, own.model, revision=own.revision, cache_dir=loading.download_dir),
            is_plain=speculative.method == _OWN_METHOD,
            is_apart=(own.model, own.revision) != (of_target.model, of_target.revision),
            has_dummy_weights=has_dummy_weights(getattr(speculative, "draft_load_config", None) or loading),
            problems=("has an FP8 KV cache, whose scales a deep sleep would lose",) if loses_scales else (),
            remedy=_BOOT,
        )
        self.prefix = _OWN_METHOD if self.is_plain else ""

    @cached_property
    def config(self) -> Any:
        """The `VllmConfig` with which vLLM built it."""
        make = getattr(self._proposer, "_create_draft_vllm_config", None)
        return make() if make is not None else getattr(self._proposer, "_draft_vllm_config", None) or self._config


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
    if draft is None or draft.refusals:
        return {}
    tables = {name: tensor.detach().clone() for name, tensor in _tables_of(draft.network)}
    return tables | read_activation_scales(draft.network)


def read_draft(
    draft: Draft, twin: Twin | Refusal, network: nn.Module, target: Inventory, values: Mapping[str, Tensor]
) -> tuple[Inventory, dict[str, str]]:
    """As `inventory_of_draft`, with the steps that write boot values back.

    Args:
        draft: The draft.
        twin: The trace of its loader, or why there is none.
        network: The target.
        target: What a refit writes of it.
        values: What `read_boot_values` gave at boot.
    """
    own, shared = inventory_of_draft(draft, twin, VllmRules(), network, target)
    if isinstance(twin, Refusal):
        return own, shared
    restored, without = restore_activation_scales(draft.network, values)
    tables, unknown = _restore_tables(draft.network, values)
    refreshes, refusals = (*own.refreshes, *restored, *tables), (*own.refusals, *without, *unknown)
    return replace(own, refreshes=refreshes, refusals=refusals), shared


def _tables_of(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, each) for name, each in network.named_parameters() if each.dtype in TABLES)


def _restore_tables(
    network: nn.Module, values: Mapping[str, Tensor]
) -> tuple[tuple[Refresh, ...], tuple[Refusal, ...]]:
    live = dict(_tables_of(network))
    if unknown := [name for name in live if name not in values]:
        reason = f"has tables of token ids ({', '.join(unknown)}) that were not read at boot"
        return (), (Refusal(module=type(network).__name__, reason=reason, remedy="Boot it with fp8refit's plugin"),)
    return ((as_booted("tables of token ids", live, values),) if live else ()), ()
