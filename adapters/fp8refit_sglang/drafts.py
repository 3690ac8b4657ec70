"""The model that drafts tokens for an SGLang engine."""

from functools import partial
from pathlib import Path
from typing import Any

from fp8refit_transformers.naming import headers_of

from fp8refit.live.slots import Refusal
from fp8refit.tracing.drafts import DraftModel
from fp8refit_sglang.compat import draft_runner_of
from fp8refit_sglang.live_scheduler import Scheduler, has_dummy_weights

_WITHOUT = "without speculative_algorithm"
_BOOT = f"Boot it from a BF16 or FP8 checkpoint of safetensors, and leave that in place, or {_WITHOUT}"


class Draft(DraftModel):
    """A model that drafts tokens.

    Args:
        runner: Its `ModelRunner`.
        of_target: The `ModelConfig` of the target.
        is_plain: Whether it is a model of its own kind, not made for a target.

    Attributes:
        model_config: Its `ModelConfig`.
        load_config: Its `LoadConfig`.
    """

    def __init__(self, runner: Any, of_target: Any, *, is_plain: bool) -> None:
        self.model_config, self.load_config = own, loading = runner.model_config, runner.load_config
        super().__init__(
            runner.model,
            partial(headers_of, own.model_path, revision=own.revision, cache_dir=loading.download_dir),
            is_plain=is_plain,
            is_apart=_place_of(own) != _place_of(of_target),
            has_dummy_weights=has_dummy_weights(loading.load_format),
            remedy=_BOOT,
        )


def draft_of(scheduler: Scheduler) -> Draft | Refusal | None:
    """The draft of this rank, or why it cannot be refitted; None if there is none, or one without weights."""
    algorithm = scheduler.draft_algorithm
    if algorithm in ("NONE", "NGRAM"):
        return None
    runner = draft_runner_of(scheduler.itself)
    if algorithm not in ("EAGLE", "EAGLE3", "STANDALONE"):  # DFLASH stacks copies of its projections of keys and values
        reason = f"drafts tokens by {algorithm}, which may keep copies of its weights"
        return _refusal(reason, f"Boot with speculative_algorithm NEXTN, EAGLE, EAGLE3 or STANDALONE, or {_WITHOUT}")
    if runner is None:
        reason = "has one model for each step, or one where fp8refit does not look for it"
        return _refusal(reason, f"Boot without enable_multi_layer_eagle, in SGLang 0.5.17 or later, or {_WITHOUT}")
    if algorithm == "EAGLE" and scheduler.has_token_map:
        reason = "keeps a copy of those rows of the target's head that are in its token map"
        return _refusal(reason, f"Boot without speculative_token_map, or {_WITHOUT}")
    return Draft(runner, scheduler.model_config, is_plain=algorithm == "STANDALONE")


def _place_of(config: Any) -> tuple[str, str]:
    """Where a model's checkpoint is. SGLang says `main` of a draft where it says nothing of the target."""
    folder = Path(config.model_path)
    return (str(folder.resolve()), "") if folder.is_dir() else (config.model_path, config.revision or "main")


def _refusal(reason: str, remedy: str) -> Refusal:
    return Refusal(module="draft model", reason=reason, remedy=remedy)
