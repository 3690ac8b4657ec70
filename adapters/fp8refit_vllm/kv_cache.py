"""The FP8 KV cache of one vLLM worker: finds its scales, and runs the live model to calibrate them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from fp8refit.live.names import attention_name
from fp8refit.live.slots import KvCache, KvLayer, KvScale, Refusal
from fp8refit.ranks.kv.measuring import Heads, LivePrefill, one_for_each_reason, refusals_to_measure
from fp8refit.tracing.rules import Why

_FP8 = ("fp8", "fp8_e4m3")
_READS_TENSORS = frozenset(
    {
        *("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLEX_ATTENTION", "TRITON_ATTN", "TRITON_ATTN_DIFFKV"),
        *("FLASHMLA", "TRITON_MLA"),
    }
)
"""Attention backends whose kernels read the scales from device tensors at run time; then those of latent attention."""
_READS_NUMBERS = frozenset({"CPU_ATTN", "FLASHINFER", "FLASHINFER_MLA"})
"""Attention backends that take the scales as Python numbers, which a CUDA graph freezes."""


def read_kv_cache(worker: Any, network: nn.Module) -> KvCache:
    """Describe the KV cache of a worker.

    Args:
        worker: A vLLM worker whose model is loaded.
        network: Its live model.
    """
    config = worker.vllm_config
    attentions = {name: module for name, module in network.named_modules() if _is_attention(module)}
    layers = {name: module for name, module in attentions.items() if _is_fp8(module)}
    if not layers:
        dtype = str(config.cache_config.cache_dtype)
        refusal = Refusal(
            module="KV cache", reason=f"is not FP8 (kv_cache_dtype={dtype!r})", remedy='Boot with kv_cache_dtype="fp8"'
        )
        return KvCache(dtype=dtype, backend="", refusals=(refusal,))
    has_graphs = _has_full_graphs(config)
    return KvCache(
        dtype="fp8_e4m3",
        backend=", ".join(dict.fromkeys(map(_backend_of, layers.values()))),
        layers=tuple(
            KvLayer(name=attention_name(name), scales=_scales_of(module)) for name, module in attentions.items()
        ),
        prefill=_prefill(config, network, list(attentions.values())),
        refusals=one_for_each_reason(
            (name, _why_not_written(module, has_graphs=has_graphs)) for name, module in layers.items()
        ),
        prefill_refusals=refusals_to_measure(_reasons_not_to_measure(attentions, network, config)),
        after_write=lambda: keep_kv_scales_through_wake(worker.model_runner, list(layers.values())),
    )


def _prefill(config: Any, network: nn.Module, attentions: Sequence[nn.Module]) -> LivePrefill:
    def forward(token_ids: Tensor, positions: Tensor, lengths: list[int]) -> None:
        with eager_forward(config, len(token_ids)):
            network(input_ids=token_ids, positions=positions)

    return LivePrefill(
        attentions=attentions,
        heads_of=_heads_of,
        forward=forward,
        vocab_size=int(config.model_config.get_vocab_size()),
        max_length=int(config.model_config.max_model_len),
        max_tokens=int(config.scheduler_config.max_num_batched_tokens),
    )


def _is_attention(module: nn.Module) -> bool:
    return "_k_scale" in module._buffers and hasattr(module, "kv_cache_dtype")


def _is_fp8(attention: Any) -> bool:
    return str(attention.kv_cache_dtype).startswith("fp8")


def _is_latent(attention: Any) -> bool:
    return hasattr(attention, "kv_lora_rank")


def _backend_of(attention: Any) -> str:
    return str(attention.attn_backend.get_name())


def _scales_of(attention: Any) -> tuple[KvScale, ...]:
    """The scales that an attention layer uses; none if it skips the FP8 cache."""
    if not _is_fp8(attention):
        return ()
    # Queries are quantized only by layers that have an operation for it; elsewhere nothing reads their scale.
    quantizes = getattr(attention, "query_quant", None) is not None
    kinds: tuple[str, ...] = ("k", "v")
    if _is_latent(attention):
        kinds, quantizes = ("k",), getattr(attention.impl, "supports_quant_query_input", False)
    if quantizes:
        kinds = ("q", *kinds)
    return tuple(
        KvScale(
            kind=kind,
            tensor=getattr(attention, f"_{kind}_scale"),
            write_copies=partial(_write_kv_scale_copies, attention, kind),
        )
        for kind in kinds
    )


def _heads_of(attention: Any) -> Heads:
    return Heads(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_size,
        v_head_dim=attention.head_size_v,
        scale=float(attention.impl.scale),
        window=attention.sliding_window,
        soft_cap=getattr(attention.impl, "logits_soft_cap", None) or None,
    )


def _why_not_written(attention: Any, *, has_graphs: bool) -> Why:
    """Why the scales of an attention layer cannot be set; None if they can."""
    if str(attention.kv_cache_dtype) not in _FP8:
        return f"stores its cache as {attention.kv_cache_dtype}", 'Boot with kv_cache_dtype="fp8"'
    if attention._k_scale.numel() != 1:
        return "has one scale per head", "Boot from a checkpoint without kv_cache_scheme"
    backend, others = _backend_of(attention), '"FLASH_ATTN" or "TRITON_ATTN"'
    if _is_latent(attention):
        others = '"TRITON_MLA" or "FLASHMLA"'
    if backend in _READS_TENSORS or (backend in _READS_NUMBERS and not has_graphs):
        return None
    if backend in _READS_NUMBERS:
        reason = f"its backend {backend} takes scales as numbers, which CUDA graphs freeze"
        return reason, f"Boot with attention_backend={others}, or with enforce_eager=True"
    return f"its backend {backend} is not known to read scales at run time", f"Boot with attention_backend={others}"


def _reasons_not_to_measure(
    attentions: Mapping[str, nn.Module], network: nn.Module, config: Any
) -> Iterator[tuple[str, str | None]]:
    """Parts of the live model that our calibration pass would not compute as the engine does, with reasons."""
    for name, module in attentions.items():
        yield name, _why_not_measured(module)
    for name, module in network.named_modules():
        if hasattr(module, "get_kv_cache_spec") and not _is_attention(module):
            yield name, f"is {type(module).__name__}, which keeps a state between tokens"
    if _is_multimodal(config):
        yield type(network).__name__, "takes more than text"
    if config.parallel_config.pipeline_parallel_size > 1:
        yield type(network).__name__, "is one of several pipeline stages"


def _why_not_measured(attention: Any) -> str | None:
    """Why plain causal attention would not compute what a layer computes; None if it would."""
    kind = getattr(attention, "attn_type", "")
    kind = getattr(kind, "value", kind)
    if type(attention).__name__ != "Attention" or kind != "decoder":
        return f"is {type(attention).__name__} (of type {kind}), not plain causal attention"
    if getattr(attention.impl, "alibi_slopes", None) is not None:
        return "attends with ALiBi"
    if getattr(attention, "has_sink", False):
        return "attends with sinks"
    if getattr(attention, "use_mm_prefix", False):
        return "attends to a prefix in both directions"
    if getattr(attention, "kv_sharing_target_layer_name", None) is not None:
        return "shares the cache of another layer"
    return None


def _kv_scale_buffers(module: nn.Module) -> list[Tensor]:
    """The scale buffers of an attention layer."""
    names = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")
    return [module._buffers[name] for name in names if module._buffers.get(name) is not None]  # type: ignore[misc]


def reset_kv_scales(model: nn.Module) -> None:
    """Set every KV-cache scale and its copies to 1.0, as booting from a checkpoint without KV scales does."""
    for module in model.modules():
        buffers = _kv_scale_buffers(module)
        if not buffers or not hasattr(module, "_k_scale_float"):
            continue
        for buffer in buffers:
            buffer.fill_(1.0)
        for name in ("_q_scale_float", "_k_scale_float", "_v_scale_float", "_prob_scale_float"):
            if hasattr(module, name):
                setattr(module, name, 1.0)
        for name in ("_k_scale_cpu", "_v_scale_cpu"):
            if hasattr(module, name):
                getattr(module, name).fill_(1.0)


def _write_kv_scale_copies(module: Any, kind: str, value: float) -> None:
    """Update an attention layer's copies of a scale: a Python number, a host tensor, and products of scales."""
    setattr(module, f"_{kind}_scale_float", value)
    if kind == "k" and _is_latent(module):  # latents are values too, and their boot gives both the same scale
        module._v_scale.fill_(value)
        _write_kv_scale_copies(module, "v", value)
    if getattr(module, "calculate_kv_scales", False):
        module.calculate_kv_scales = False  # or the next forward would recompute the scales (0.26)
    on_host = getattr(module, f"_{kind}_scale_cpu", None)
    if on_host is not None:
        on_host.fill_(value)
    for product in ("bmm1_scale", "bmm2_scale"):  # FlashInfer recomputes them if they are None
        if getattr(module.impl, product, None) is not None:
            setattr(module.impl, product, None)


def keep_kv_scales_through_wake(runner: Any, layers: Sequence[Any]) -> None:
    """Restore KV scales when the cache wakes up: the first model runner of 0.26 resets them to 1.0."""
    reset = getattr(type(runner), "init_fp8_kv_scales", None)
    if reset is None:
        return

    def reset_and_restore() -> None:
        reset(runner)
        for layer in layers:
            layer._k_scale.fill_(layer._k_scale_float)
            layer._v_scale.fill_(layer._v_scale_float)

    runner.__dict__["init_fp8_kv_scales"] = reset_and_restore


def _has_full_graphs(config: Any) -> bool:
    """Whether CUDA graphs capture attention; piecewise graphs do not."""
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    return mode is not None and bool(mode.has_full_cudagraphs())


def _is_multimodal(config: Any) -> bool:
    """Whether a model takes more than text, or has multi-dimensional positions."""
    return bool(config.model_config.is_multimodal_model or config.model_config.uses_mrope)


@contextmanager
def eager_forward(config: Any, num_tokens: int) -> Iterator[None]:
    """A context in which the model can be called directly: not compiled, without graphs and attention metadata."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=num_tokens, skip_compiled=True):
        yield
