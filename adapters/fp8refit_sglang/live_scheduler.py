"""A scheduler of SGLang, as one rank sees it: its model, its KV cache and its CUDA graphs."""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fp8refit.errors import EngineAsleepError
from fp8refit.live.slots import FP8_DTYPE, dtype_name
from fp8refit_sglang.apart import set_apart
from fp8refit_sglang.compat import (
    forward_scope,
    has_dp_attention,
    has_graphs,
    num_stages,
    recapture,
    replica_of,
    updater_of,
)


class Scheduler:
    """The scheduler of one rank.

    Args:
        scheduler: SGLang's scheduler object.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @property
    def itself(self) -> Any:
        """SGLang's scheduler object."""
        return self._scheduler

    @property
    def model(self) -> nn.Module:
        """The live model."""
        model: nn.Module = self._runner.model
        return model

    @property
    def lora_manager(self) -> Any:
        """SGLang's `LoRAManager`; None if it serves no adapters."""
        return getattr(self._runner, "lora_manager", None)

    @property
    def process_group(self) -> ProcessGroup:
        """The CPU process group of this replica's ranks."""
        group: ProcessGroup = self._group.cpu_group
        return group

    @property
    def _group(self) -> Any:
        """Those of this replica's ranks in SGLang: of all stages of a pipeline, if there are several."""
        return self._scheduler.tp_group if self.num_stages == 1 else self._scheduler.world_group

    @property
    def rank(self) -> int:
        """This rank's number among those of all replicas."""
        return replica_of(self._scheduler) * self.num_ranks + int(self._group.rank_in_group)

    @property
    def num_ranks(self) -> int:
        """The number of this replica's ranks."""
        return int(self._group.world_size)

    @property
    def num_stages(self) -> int:
        """How many stages its pipeline has."""
        return num_stages(self._scheduler.server_args)

    @property
    def num_later_stages(self) -> int:
        """How many stages of the pipeline come after this rank's."""
        later = self.num_stages - 1
        return later - int(self._scheduler.pp_group.rank_in_group) if later else 0

    @property
    def steps_in_parts(self) -> bool:
        """Whether a forward takes more than this rank's tokens and its tensor-parallel group."""
        return self.num_stages > 1 or has_dp_attention(self._scheduler.server_args)

    @property
    def draft_algorithm(self) -> str:
        """How tokens are drafted, by the name of SGLang's `SpeculativeAlgorithm`."""
        return str(getattr(getattr(self._scheduler, "spec_algorithm", None), "name", "NONE"))

    @property
    def has_token_map(self) -> bool:
        """Whether a draft may propose only some tokens, which the user lists."""
        return self._scheduler.server_args.speculative_token_map is not None

    @property
    def has_dummy_weights(self) -> bool:
        """Whether the engine was booted with dummy weights."""
        return has_dummy_weights(self._scheduler.server_args.load_format)

    @property
    def is_multimodal(self) -> bool:
        """Whether the model takes more than text."""
        return bool(getattr(self._scheduler.model_config, "is_multimodal", False))

    @property
    def sleeping_tags(self) -> frozenset[str]:
        """What `release_memory_occupation` released."""
        return frozenset(updater_of(self._scheduler).offload_tags)

    @property
    def has_open_session(self) -> bool:
        """Whether one of SGLang's own weight updates has begun and not ended."""
        return getattr(updater_of(self._scheduler), "_session", None) is not None

    @property
    def model_config(self) -> Any:
        """SGLang's `ModelConfig`."""
        return self._runner.model_config

    @property
    def load_config(self) -> Any:
        """SGLang's `LoadConfig`."""
        return self._runner.load_config

    @property
    def cache_dtype(self) -> str:
        """The dtype of the KV cache. For E4M3, which SGLang uses for several formats, the value of `kv_cache_dtype`."""
        runner = self._runner
        if runner.kv_cache_dtype is not FP8_DTYPE:
            return dtype_name(runner.kv_cache_dtype)
        # 0.5.15 has only the arguments, and replaces `auto` in them by what it chose.
        has_name = hasattr(runner, "kv_cache_dtype_str")
        return str(runner.kv_cache_dtype_str if has_name else runner.server_args.kv_cache_dtype)

    @property
    def attention_backends(self) -> tuple[str, str]:
        """SGLang's attention backends for prefill and for decode."""
        runner = self._runner
        return str(runner.prefill_attention_backend_str), str(runner.decode_attention_backend_str)

    @property
    def has_latent_cache(self) -> bool:
        """Whether the KV cache holds latents (MLA)."""
        return bool(self._runner.use_mla_backend)

    @property
    def has_decode_graphs(self) -> bool:
        """Whether CUDA graphs capture decoding."""
        return not has_graphs("decode", "disabled", self._scheduler.server_args)

    @property
    def has_full_prefill_graphs(self) -> bool:
        """Whether CUDA graphs capture prefill with its attention; other prefill graphs leave attention to Python."""
        return has_graphs("prefill", "full", self._scheduler.server_args)

    def check_can_recapture(self) -> None:
        """Check that CUDA graphs can be captured now.

        Raises:
            EngineAsleepError: A part of the engine is asleep.
        """
        if self.sleeping_tags:
            raise EngineAsleepError(
                "new KV scales require recapturing CUDA graphs, and part of the engine is asleep; call "
                "resume_memory_occupation() before refit"
            )

    def recapture(self) -> None:
        """Recapture decode graphs.

        Raises:
            EngineAsleepError: A part of the engine is asleep.
        """
        self.check_can_recapture()
        recapture(self._runner)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return int(self._scheduler.model_config.vocab_size)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a sequence."""
        return int(self._scheduler.model_config.context_len)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens that SGLang prefills at once."""
        chunk = self._scheduler.chunked_prefill_size
        return int(chunk if chunk is not None else self._scheduler.max_prefill_tokens)

    def forward_scope(self) -> AbstractContextManager[None]:
        """The context in which SGLang runs every forward of its model."""
        return forward_scope(self._runner)

    @property
    def _runner(self) -> Any:
        return self._scheduler.tp_worker.model_runner

    @property
    def is_paused(self) -> bool:
        """Whether somebody paused generation: nothing runs until it continues."""
        return bool(self._scheduler._engine_paused)

    def set_apart(self) -> None:
        """Let running requests go on with their KV, and no request share it that begins later.

        A forward may still run, as SGLang takes its result only when it prepares the one after the next.
        """
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        set_apart(self._scheduler)

    def flush(self) -> bool:
        """Drop the KV cache. Returns False if a running request uses it; waiting requests do not."""
        waiting = self._scheduler.waiting_queue
        self._scheduler.waiting_queue = type(waiting)()
        try:
            return bool(self._scheduler.flush_cache(empty_cache=False))
        finally:
            self._scheduler.waiting_queue = waiting


def has_dummy_weights(load_format: Any) -> bool:
    """Whether a load format of SGLang's makes weights up."""
    return str(getattr(load_format, "value", load_format)) == "dummy"


def decoder_of(model: nn.Module) -> nn.Module | None:
    """The part of a language model between token ids and logits, if it takes the arguments of SGLang's own models."""
    decoder = getattr(model, "model", None)
    if not isinstance(decoder, nn.Module):
        return None
    # From the class: piecewise CUDA graphs wrap the instance's method.
    names = list(inspect.signature(type(decoder).forward).parameters)
    return decoder if names[1:4] == ["input_ids", "positions", "forward_batch"] else None


def prefill_batch(token_ids: Tensor, positions: Tensor, lengths: Sequence[int]) -> Any:
    """A batch of whole sequences without requests and without space in the KV cache.

    Args:
        token_ids: (N,) int64, one sequence after another.
        positions: (N,) int64, each token's position in its sequence.
        lengths: Number of tokens of each sequence.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    device = token_ids.device
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lengths),
        input_ids=token_ids,
        req_pool_indices=torch.zeros(len(lengths), dtype=torch.int64, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int64, device=device),
        out_cache_loc=torch.zeros_like(token_ids),
        seq_lens_sum=len(token_ids),
        positions=positions,
    )
