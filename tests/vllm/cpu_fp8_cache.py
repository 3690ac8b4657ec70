"""Attention over an FP8 KV cache for vLLM on a CPU without AVX-512, which vLLM has no kernel for: torch's, read block by block.

Scheduler, block tables, slots and scales are vLLM's. Only what its C++ does with an FP8 cache is done here, in double precision
as the products of `cpu_kernel.py` are, and for the same reason.
"""

from functools import lru_cache

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn

FP8 = torch.float8_e4m3fn
LIMIT = torch.finfo(FP8).max


@lru_cache(maxsize=1)
def register() -> None:
    """Do what vLLM cannot on this CPU, once; nothing where it can."""
    if torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported():
        return
    choose, schedule = cpu_attn._get_attn_isa, ops.cpu_attn_get_scheduler_metadata
    store, attend = ops.cpu_attn_reshape_and_cache, ops.cpu_attention_with_kv_cache

    def choose_any(dtype, block_size, head_size=None, kv_cache_dtype=None):
        return choose(dtype, block_size, head_size, None)

    def schedule_any(*args, kv_cache_dtype="auto", **options):
        return schedule(*args, **options)

    def store_any(*args, kv_cache_dtype="auto", **options):
        how = store_fp8 if cpu_attn.is_quantized_kv_cache(kv_cache_dtype) else store
        how(*args, **options)

    def attend_any(*args, kv_cache_dtype="auto", **options):
        how = attend_fp8 if cpu_attn.is_quantized_kv_cache(kv_cache_dtype) else attend
        how(*args, **options)

    cpu_attn._get_attn_isa = choose_any
    ops.cpu_attn_get_scheduler_metadata = schedule_any
    ops.cpu_attn_reshape_and_cache = store_any
    ops.cpu_attention_with_kv_cache = attend_any


def store_fp8(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Keys and values (tokens, heads, size) to their slots of caches (blocks, heads, tokens of a block, size)."""
    block_size = key_cache.shape[2]
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored]
    for cache, values, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        kept = values[: slot_mapping.shape[0]][is_stored].float() / scale
        codes = kept.clamp(-LIMIT, LIMIT).to(FP8).view(torch.uint8)
        cache.view(torch.uint8)[slots // block_size, :, slots % block_size] = codes


def attend_fp8(
    *,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: Tensor | None,
    sliding_window: int,
    block_table: Tensor,
    softcap: float,
    scheduler_metadata: Tensor,
    s_aux: Tensor | None,
    dynamic_causal: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Attention of queries (tokens, heads, size), request after request, into `output` of the same shape."""
    assert causal and alibi_slopes is None and s_aux is None and dynamic_causal is None, "no model of the tests has it"
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for request, length in enumerate(lengths):
        first, end = starts[request : request + 2]
        if first == end:
            continue
        keys, values = (
            _read(cache, block_table[request], length, scale)
            for cache, scale in ((key_cache, k_scale), (value_cache, v_scale))
        )
        queries = query[first:end].double().transpose(0, 1)
        group = queries.shape[0] // keys.shape[0]
        scores = scale * queries @ keys.repeat_interleave(group, 0).transpose(1, 2)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        places, own = torch.arange(length), torch.arange(length - (end - first), length)[:, None]
        is_hidden = places > own
        if sliding_window > 0:
            is_hidden |= places <= own - sliding_window
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        found = weights @ values.repeat_interleave(group, 0)
        output[first:end] = found.transpose(0, 1).reshape(output[first:end].shape)


def _read(cache: Tensor, blocks: Tensor, length: int, scale: float) -> Tensor:
    """The first `length` tokens of a request, (heads, tokens, size), as they are meant."""
    block_size = cache.shape[2]
    held = cache.view(torch.uint8)[blocks[: -(-length // block_size)].long()]
    return held.transpose(0, 1).flatten(1, 2)[:, :length].view(FP8).double() * scale
