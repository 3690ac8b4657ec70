"""The FP8 KV cache of one SGLang rank: finds its scales, and runs the live model to calibrate them.

SGLang divides keys and values by a layer's scales when it writes the cache, and multiplies when it reads. Queries have
no scale. SGLang does not clamp (`MHATokenToKVPool.set_kv_buffer` calls `Tensor.to`): depending on PyTorch's version and
the device, values beyond 464 times the scale saturate or become NaN.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.live.names import attention_name
from fp8refit.live.slots import KvCache, KvLayer, KvScale, Refusal
from fp8refit.ranks.kv.measuring import Heads, LivePrefill, refusals_to_measure
from fp8refit_sglang.compat import is_cache_fp8, make_kv_scales
from fp8refit_sglang.live_scheduler import Scheduler, decoder_of, prefill_batch

_FP8 = "fp8_e4m3"
_READS_TENSORS = frozenset({"fa3"})
"""Attention backends whose kernels read the scales from device tensors at run time."""
_READS_NUMBERS = frozenset({"flashinfer", "triton"})
"""Attention backends that take SGLang's copies of the scales as Python numbers, which a CUDA graph freezes."""
_MAX_FA3_HEAD = 256
"""fa3 writes larger heads divided by their scales, but reads them as if the scales were 1."""
_BOOT_FP8 = f'Boot with kv_cache_dtype="{_FP8}"'
_BOOT_FA3 = 'Boot with attention_backend="fa3"'


@dataclass(frozen=True, slots=True)
class HeldScale:
    """One scale of an attention layer: a tensor, and SGLang's copy as a Python number."""

    module: nn.Module
    kind: str
    """`k` or `v`."""
    tensor: Tensor

    @property
    def number(self) -> float:
        """The copy, which survives sleep."""
        return float(getattr(self.module, f"{self.kind}_scale_float"))

    def set_number(self, value: float) -> None:
        """Write the copy."""
        setattr(self.module, f"{self.kind}_scale_float", value)


class HeldScales:
    """All KV scales of an engine's models, whatever the dtype of its cache.

    Args:
        is_noise: Whether a dummy boot filled the tensors and their copies with noise.
    """

    def __init__(self, *, is_noise: bool) -> None:
        self._is_noise = is_noise
        self._scales: list[HeldScale] = []

    def read(self, *models: nn.Module) -> None:
        """Find the scales that `models` have now."""
        self._scales = [scale for model in models for module in model.modules() for scale in scales_of(module)]

    def write_copy(self, scale: HeldScale, value: float) -> None:
        """Write SGLang's copy of a scale."""
        self._forget_noise()
        scale.set_number(value)

    def restore(self) -> None:
        """Restore every tensor from its copy, in two kernel launches."""
        self._forget_noise()
        if self._scales:
            tensors = [scale.tensor for scale in self._scales]
            torch._foreach_zero_(tensors)
            torch._foreach_add_(tensors, [scale.number for scale in self._scales])

    def _forget_noise(self) -> None:
        """After a dummy boot, set all copies to 1, as booting from a checkpoint without KV scales does."""
        if self._is_noise:
            for scale in self._scales:
                scale.set_number(1.0)
            self._is_noise = False


def is_attention(module: nn.Module) -> bool:
    """Whether `module` is an attention layer with a KV cache."""
    return hasattr(module, "k_scale_float")


def scales_of(module: nn.Module) -> list[HeldScale]:
    """The scales of an attention layer; empty for other modules."""
    found = {kind: module._parameters.get(f"{kind}_scale") for kind in ("k", "v")} if is_attention(module) else {}
    return [HeldScale(module, kind, scale.data) for kind, scale in found.items() if scale is not None]


def give_scales(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the constructor of attention layers: with an FP8 cache, add scales if SGLang does not.

    Some models (Qwen3) do not pass their quantization to attention. The scales exist before CUDA graphs are captured,
    and are 1 until they are set, so results stay the same.
    """
    original(layer, *args, **kwargs)
    if getattr(layer, "quant_method", layer) is None and getattr(layer, "k_scale", layer) is None and is_cache_fp8():
        make_kv_scales(layer)


def casts_saturate(device: torch.device) -> bool:
    """Whether PyTorch's cast to E4M3 saturates on `device`. Depending on version and device it returns NaN instead."""
    large = torch.full((1,), 1e4, dtype=torch.bfloat16, device=device)
    return bool(large.to(torch.float8_e4m3fn).float().isfinite().all())


def read_kv_cache(scheduler: Scheduler, scales: HeldScales) -> KvCache:
    """Describe the KV cache of a rank.

    Args:
        scheduler: A scheduler whose model is loaded.
        scales: The model's scales.
    """
    dtype, backends = scheduler.cache_dtype, dict.fromkeys(scheduler.attention_backends)
    if dtype != _FP8:
        refusal = Refusal(module="KV cache", reason=f"is {dtype}, not {_FP8}", remedy=_BOOT_FP8)
        return KvCache(dtype=dtype, backend=", ".join(backends), refusals=(refusal,))
    attentions = {name: module for name, module in scheduler.model.named_modules() if is_attention(module)}

    def has_numbers_in_graphs() -> bool:
        return bool(_READS_NUMBERS.intersection(backends)) and scheduler.has_decode_graphs

    def check_now() -> None:
        if has_numbers_in_graphs():
            scheduler.check_can_recapture()

    def finish() -> None:
        scales.restore()  # also the scales that were noise until now
        if has_numbers_in_graphs():
            scheduler.recapture()

    return KvCache(
        dtype=dtype,
        backend=", ".join(backends),
        layers=tuple(
            KvLayer(name=attention_name(name), scales=_scales_to_write(module, scales))
            for name, module in attentions.items()
        ),
        prefill=_prefill(scheduler, list(attentions.values())),
        saturates=casts_saturate(next(scheduler.model.parameters()).device),
        refusals=tuple(_why_not_written(scheduler, attentions)),
        prefill_refusals=refusals_to_measure(_reasons_not_to_measure(scheduler, attentions)),
        check_now=check_now,
        after_write=finish,
    )


def _prefill(scheduler: Scheduler, attentions: Sequence[nn.Module]) -> LivePrefill:
    def forward(token_ids: Tensor, positions: Tensor, lengths: list[int]) -> None:
        decoder = decoder_of(scheduler.model)
        assert decoder is not None, "checked"
        batch = prefill_batch(token_ids, positions, lengths)
        with scheduler.forward_scope():
            decoder(token_ids, positions, batch)

    return LivePrefill(
        attentions=attentions,
        heads_of=heads_of,
        forward=forward,
        vocab_size=scheduler.vocab_size,
        max_length=scheduler.max_length,
        max_tokens=scheduler.max_tokens,
    )


def heads_of(attention: Any) -> Heads:
    """The heads of an attention layer."""
    window = attention.sliding_window_size  # SGLang excludes the token itself
    return Heads(
        num_heads=attention.tp_q_head_num,
        num_kv_heads=attention.tp_k_head_num,
        head_dim=attention.qk_head_dim,
        v_head_dim=attention.v_head_dim,
        scale=float(attention.scaling),
        window=window + 1 if window > -1 else None,
        soft_cap=attention.logit_cap or None,
    )


def _scales_to_write(attention: nn.Module, scales: HeldScales) -> tuple[KvScale, ...]:
    return tuple(
        KvScale(kind=held.kind, tensor=held.tensor, write_copies=partial(scales.write_copy, held))
        for held in scales_of(attention)
    )


def _why_not_written(scheduler: Scheduler, attentions: Mapping[str, Any]) -> list[Refusal]:
    """Why the scales cannot be set, with remedies."""
    refusals = list(_why_not_reached(scheduler))
    without = [name for name, module in attentions.items() if not scales_of(module)]
    if without:
        reason = f"has no KV scales (one of {len(without)} such layers)"
        remedy = f"{_BOOT_FP8}, with fp8refit installed where the engine runs"
        refusals.append(Refusal(module=without[0], reason=reason, remedy=remedy))
    wide = [name for name, module in attentions.items() if module.qk_head_dim > _MAX_FA3_HEAD]
    if wide and _READS_TENSORS.intersection(scheduler.attention_backends):
        reason = f"has heads larger than {_MAX_FA3_HEAD}, which fa3 reads without their scales"
        refusals.append(Refusal(module=wide[0], reason=reason, remedy='Boot with attention_backend="triton"'))
    return refusals


def _why_not_reached(scheduler: Scheduler) -> list[Refusal]:
    """Reasons that apply to all layers."""
    if scheduler.has_latent_cache:
        reason = "holds latents, which SGLang writes as if their scale were 1"
        return [Refusal(module="KV cache", reason=reason, remedy="fp8refit sets no scales of latent caches")]
    refusals = []
    if scheduler.num_stages > 1:
        reason = "is spread over stages of a pipeline, which know only their own layers"
        refusals.append(Refusal(module="KV cache", reason=reason, remedy="Boot without pp_size to set KV scales"))
    for backend in dict.fromkeys(scheduler.attention_backends):
        if backend not in _READS_TENSORS | _READS_NUMBERS:
            reason = "is not known to read KV scales at run time"
            refusals.append(Refusal(module=f"attention backend {backend}", reason=reason, remedy=_BOOT_FA3))
        elif backend in _READS_NUMBERS and scheduler.has_full_prefill_graphs:
            reason = "takes KV scales as numbers, which graphs of a whole prefill freeze"
            remedy = f"{_BOOT_FA3}, or with disable_prefill_cuda_graph=True"
            refusals.append(Refusal(module=f"attention backend {backend}", reason=reason, remedy=remedy))
    return refusals


def _reasons_not_to_measure(scheduler: Scheduler, attentions: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Parts of the live model that our calibration pass would not compute as the engine does, with reasons."""
    model = scheduler.model
    if scheduler.steps_in_parts:
        yield type(model).__name__, "is one of several pipeline stages, or steps together with other replicas"
    if decoder_of(model) is None:
        yield type(model).__name__, "is not built like SGLang's language models"
    for name, module in attentions.items():
        yield name, _why_not_measured(module)
    for name, module in model.named_modules():
        if getattr(module, "sinks", None) is not None:
            yield name, "attends with sinks"


def _why_not_measured(attention: Any) -> str | None:
    """Why plain causal attention would not compute what a layer computes; None if it would."""
    kind = getattr(attention.attn_type, "value", attention.attn_type)
    if attention.is_cross_attention or kind != "decoder":
        return f"is {'cross' if attention.is_cross_attention else kind} attention, not plain causal attention"
    if attention.pos_encoding_mode != "NONE":
        return f"encodes positions itself ({attention.pos_encoding_mode})"
    if attention.xai_temperature_len > 0:
        return "scales its scores by position"
    if attention.use_irope:
        return "attends within chunks"
    if attention.logit_cap and attention.logit_capping_method != "tanh":
        return f"caps its scores by {attention.logit_capping_method}"
    return None
