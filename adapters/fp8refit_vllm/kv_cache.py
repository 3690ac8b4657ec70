"""The FP8 KV cache of one vLLM worker: finds its scales, and runs the live model to calibrate them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.live.names import attention_name
from fp8refit.live.slots import KvCache, KvLayer, KvScale, Observe, Refusal
from fp8refit.ranks.kv.attention import PackedSequences
from fp8refit.ranks.kv.measuring import Heads, measured

_FP8 = ("fp8", "fp8_e4m3")
_READS_TENSORS = frozenset({"FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLEX_ATTENTION", "TRITON_ATTN", "TRITON_ATTN_DIFFKV"})
"""Attention backends whose kernels read the scales from device tensors at run time."""
_READS_NUMBERS = frozenset({"CPU_ATTN", "FLASHINFER"})
"""Attention backends that take the scales as Python numbers, which a CUDA graph freezes."""
_GIVE_SCALES = "Give the scales instead (kv_scales=)"


def read_kv_cache(worker: Any, network: nn.Module) -> KvCache:
    """Describe the KV cache of a worker.

    Args:
        worker: A vLLM worker whose model is loaded.
        network: Its live model.
    """
    config = worker.vllm_config
    found = [_Layer(name, module) for name, module in network.named_modules() if _is_attention(module)]
    layers = [layer for layer in found if layer.is_fp8]
    if not layers:
        dtype = str(config.cache_config.cache_dtype)
        refusal = Refusal(
            module="KV cache", reason=f"is not FP8 (kv_cache_dtype={dtype!r})", remedy='Boot with kv_cache_dtype="fp8"'
        )
        return KvCache(dtype=dtype, backend="", refusals=(refusal,))
    backends = dict.fromkeys(layer.backend for layer in layers)
    return KvCache(
        dtype="fp8_e4m3",
        backend=", ".join(backends),
        layers=tuple(KvLayer(name=attention_name(layer.name), scales=layer.scales()) for layer in found),
        prefill=LivePrefill(worker.vllm_config, network, found, _device_of(network)),
        refusals=tuple(_why_not_written(layers, has_graphs=_has_full_graphs(config))),
        prefill_refusals=tuple(_why_not_measured(found, network, config)),
        after_write=lambda: keep_kv_scales_through_wake(worker.model_runner, [layer.module for layer in layers]),
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """One attention layer of a live model."""

    name: str
    module: Any

    @property
    def is_fp8(self) -> bool:
        return str(self.module.kv_cache_dtype).startswith("fp8")

    @property
    def backend(self) -> str:
        return str(self.module.attn_backend.get_name())

    @property
    def is_latent(self) -> bool:
        return hasattr(self.module, "kv_lora_rank")

    def scales(self) -> tuple[KvScale, ...]:
        """The scales that the layer uses; none if it skips the FP8 cache."""
        if not self.is_fp8:
            return ()
        # Queries are quantized only by layers that have an operation for it; elsewhere nothing reads their scale.
        kinds = ("k",) if self.is_latent else ("k", "v")
        if getattr(self.module, "query_quant", None) is not None:
            kinds = ("q", *kinds)
        return tuple(
            KvScale(
                kind=kind,
                tensor=getattr(self.module, f"_{kind}_scale"),
                write_copies=_writer(self.module, kind),
            )
            for kind in kinds
        )

    def why_not_written(self, *, has_graphs: bool) -> tuple[str, str] | None:
        """Why the scales cannot be set, and the remedy; None if they can."""
        module = self.module
        if str(module.kv_cache_dtype) not in _FP8:
            return f"stores its cache as {module.kv_cache_dtype}", 'Boot with kv_cache_dtype="fp8"'
        if module._k_scale.numel() != 1:
            return "has one scale per head", "Boot from a checkpoint without kv_cache_scheme"
        if self.is_latent:
            return "stores keys and values as latents", "fp8refit does not set the scales of latent caches yet"
        if self.backend in _READS_TENSORS or (self.backend in _READS_NUMBERS and not has_graphs):
            return None
        if self.backend in _READS_NUMBERS:
            reason = f"its backend {self.backend} takes scales as numbers, which CUDA graphs freeze"
            return reason, 'Boot with attention_backend="FLASH_ATTN" or "TRITON_ATTN", or with enforce_eager=True'
        return f"its backend {self.backend} is not known to read scales at run time", (
            'Boot with attention_backend="FLASH_ATTN" or "TRITON_ATTN"'
        )

    def why_not_measured(self) -> str | None:
        """Why plain causal attention would not compute what this layer computes; None if it would."""
        module, impl = self.module, self.module.impl
        kind = getattr(module, "attn_type", "")
        kind = getattr(kind, "value", kind)
        if type(module).__name__ != "Attention" or kind != "decoder":
            return f"is {type(module).__name__} (of type {kind}), not plain causal attention"
        if getattr(impl, "alibi_slopes", None) is not None:
            return "attends with ALiBi"
        if getattr(module, "has_sink", False):
            return "attends with sinks"
        if getattr(module, "use_mm_prefix", False):
            return "attends to a prefix in both directions"
        if getattr(module, "kv_sharing_target_layer_name", None) is not None:
            return "shares the cache of another layer"
        return None

    def heads(self) -> Heads:
        module = self.module
        return Heads(
            num_heads=module.num_heads,
            num_kv_heads=module.num_kv_heads,
            head_dim=module.head_size,
            v_head_dim=module.head_size_v,
            scale=float(module.impl.scale),
            window=module.sliding_window,
            soft_cap=getattr(module.impl, "logits_soft_cap", None) or None,
        )


class LivePrefill:
    """Implements `fp8refit.live.slots.Prefill` on a worker's live model: eagerly, without requests or KV cache.

    With tensor parallelism, all ranks must run it together.
    """

    def __init__(self, config: Any, network: nn.Module, layers: Sequence[_Layer], device: torch.device) -> None:
        self._config = config
        self._network = network
        self._layers = layers
        self._device = device
        self.vocab_size = int(config.model_config.get_vocab_size())
        self.max_length = int(config.model_config.max_model_len)
        self.max_tokens = int(config.scheduler_config.max_num_batched_tokens)

    def __call__(self, sequences: Sequence[Tensor], observe: Observe) -> None:
        """Run one pass over `sequences`, each (L,) int64 on the engine's device, and remove all hooks."""
        packed = PackedSequences([len(sequence) for sequence in sequences], self._device)
        token_ids = torch.cat(list(sequences))
        layers = [(layer.module, layer.heads()) for layer in self._layers]
        with measured(layers, packed, observe), eager_forward(self._config, len(token_ids)):
            self._network(input_ids=token_ids, positions=packed.positions)


def _is_attention(module: nn.Module) -> bool:
    return "_k_scale" in module._buffers and hasattr(module, "kv_cache_dtype")


def _device_of(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def _writer(module: Any, kind: str) -> Callable[[float], None]:
    return lambda value: _write_kv_scale_copies(module, kind, value)


def _why_not_written(layers: Sequence[_Layer], *, has_graphs: bool) -> list[Refusal]:
    """One refusal per reason, naming the first layer it applies to."""
    found: dict[tuple[str, str], str] = {}
    for layer in layers:
        why = layer.why_not_written(has_graphs=has_graphs)
        if why is not None:
            found.setdefault(why, layer.name)
    return [Refusal(module=name, reason=reason, remedy=remedy) for (reason, remedy), name in found.items()]


def _why_not_measured(layers: Sequence[_Layer], network: nn.Module, config: Any) -> list[Refusal]:
    """Parts of the live model that our calibration pass would not compute as the engine does."""
    found: dict[str, str] = {}
    for layer in layers:
        why = layer.why_not_measured()
        if why is not None:
            found.setdefault(why, layer.name)
    known = {id(layer.module) for layer in layers}
    for name, module in network.named_modules():
        if hasattr(module, "get_kv_cache_spec") and id(module) not in known:
            found.setdefault(f"is {type(module).__name__}, which keeps a state between tokens", name)
    if _is_multimodal(config):
        found.setdefault("takes more than text", type(network).__name__)
    if config.parallel_config.pipeline_parallel_size > 1:
        found.setdefault("is one of several pipeline stages", type(network).__name__)
    return [Refusal(module=name, reason=reason, remedy=_GIVE_SCALES) for reason, name in found.items()]


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
