"""A latent cache (MLA) in FP8 for vLLM on a CPU, whose backend for latents stores BF16 alone (`CPUMLABackend`).

Older versions of vLLM have no such backend.

Layers, scales, block tables and slots are vLLM's. As in vLLM's Triton kernel, whose name it goes by, the scale is read from the
layer's tensor when a latent is stored and when it is attended to, as key and as value.
"""

from importlib.util import find_spec

import torch

FP8 = torch.float8_e4m3fn
LIMIT = torch.finfo(FP8).max


def register() -> None:
    """Let engines in this process have `kv_cache_dtype="fp8"` with latent attention."""
    if find_spec("vllm.v1.attention.backends.mla.cpu_mla") is None:
        return
    from vllm.v1.attention.backends.mla import cpu_mla

    backend, impl = cpu_mla.CPUMLABackend, cpu_mla.CPUMLAImpl
    if "fp8" in backend.supported_kv_cache_dtypes:
        return
    backend.supported_kv_cache_dtypes = [*backend.supported_kv_cache_dtypes, "fp8"]
    backend.get_name = staticmethod(lambda: "TRITON_MLA")
    store, attend = impl.do_kv_cache_update, impl.forward_mqa

    def store_any(self, latents, rotary, cache, slots, dtype, scale):
        if not dtype.startswith("fp8") or not cache.numel():
            return store(self, latents, rotary, cache, slots, dtype, scale)
        rows, is_stored = torch.cat([latents, rotary.squeeze(1)], -1), slots >= 0
        codes = (rows[: len(slots)][is_stored].float() / scale).clamp(-LIMIT, LIMIT).to(FP8)
        cache.view(torch.uint8).view(-1, rows.shape[1])[slots[is_stored]] = codes.view(torch.uint8)

    def attend_any(self, query, cache, metadata, layer):
        if cache.dtype is not FP8:
            return attend(self, query, cache, metadata, layer)
        query = torch.cat(query, -1) if isinstance(query, tuple) else query
        found = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        for request, length in enumerate(metadata.decode.seq_lens.tolist()):
            blocks = metadata.decode.block_table[request, : -(-length // cache.shape[1])].long()
            held = cache.view(torch.uint8)[blocks].flatten(0, 1)[:length].view(FP8).double() * layer._k_scale
            weights = (self.scale * query[request].double() @ held.t()).softmax(-1)
            found[request] = weights @ held[:, : self.kv_lora_rank]
        return found, None

    impl.do_kv_cache_update, impl.forward_mqa = store_any, attend_any
