"""Kernels by which SGLang drafts tokens and checks them, in torch, for chains of drafts (`speculative_eagle_topk=1`).

SGLang's own workers, batches and models run unmodified around them. Nothing here speaks for trees of drafts.
"""

import sys

import sgl_kernel
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from torch import Tensor


def register() -> None:
    """Let torch-native attention draft and check, which SGLang has for no CPU without AMX."""
    for name, kernel in KERNELS.items():
        setattr(sgl_kernel, name, kernel)
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("sglang.")]
    for module in modules:  # some have imported them
        absent = {key: held for key, held in module.items() if isinstance(held, sgl_kernel.AbsentKernel)}
        for key, held in absent.items():
            module[key] = KERNELS.get(held.__name__.rpartition(".")[2], held)
    torch.cuda.synchronize = lambda *_: None  # called by models that take the target's embedding
    TorchNativeAttnBackend._run_sdpa_forward_extend = with_drafts(TorchNativeAttnBackend._run_sdpa_forward_extend)
    TorchNativeAttnBackend._run_sdpa_forward_decode = ahead(TorchNativeAttnBackend._run_sdpa_forward_decode)
    DraftBackendFactory.create_decode_backend = lambda factory: Steps(factory)
    DraftBackendFactory.create_draft_extend_backend = lambda factory: TorchNativeAttnBackend(factory.draft_model_runner)


class Steps:
    """Attention of each step of drafting after the first: it sees one token more than that of the step before."""

    def __init__(self, factory: DraftBackendFactory) -> None:
        num_steps = factory.speculative_num_steps - 1
        self.attn_backends = [TorchNativeAttnBackend(factory.draft_model_runner) for _ in range(num_steps)]
        for step, backend in enumerate(self.attn_backends):
            backend.num_ahead = step + 1

    def init_forward_metadata(self, batch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(batch)


def ahead(decode):
    def attend(self, query, output, keys, values, places, requests, lengths, *more, **options):
        lengths = lengths + getattr(self, "num_ahead", 0)
        return decode(self, query, output, keys, values, places, requests, lengths, *more, **options)

    return attend


def with_drafts(extend):
    def attend(self, query, output, keys, values, places, requests, lengths, before, added, *more, **options):
        if before is None:  # drafts are checked: as many of each request
            before, added = lengths, torch.full_like(lengths, len(query) // len(lengths))
            lengths = lengths + added
        return extend(self, query, output, keys, values, places, requests, lengths, before, added, *more, **options)

    return attend


def leave(pointers, strides, to: Tensor, source: Tensor) -> None:
    """A chain's keys and values lie where they belong."""
    assert torch.equal(to, source)


def read_places(requests, places, starts, ends, found, width) -> None:
    each = zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True)
    rows = torch.cat([places[request, start:end] for request, start, end in each])
    found[: len(rows)] = rows


def read_next_places(requests, places, starts, found, width, topk, num_steps) -> None:
    read_places(requests, places, starts, starts + topk * num_steps, found, width)


def write_places(requests, places, starts, ends, given, width) -> None:
    done = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        places[request, start:end] = given[done : done + end - start]
        done += end - start


def take_last(accepted, lengths, last, stride) -> None:
    rows = torch.arange(len(lengths)) * stride
    last[:] = accepted.flatten()[rows + lengths - 1]


def build_chains(parents, chosen, lengths, mask, positions, own, following, sibling, topk, depth, width, mode) -> None:
    assert topk == 1
    steps, shape = torch.arange(width), (len(lengths), width)
    positions.view(shape)[:] = lengths[:, None] + steps
    own.view(shape)[:] = torch.arange(own.numel()).view(shape)
    following.view(shape)[:] = torch.where(steps + 1 < width, steps + 1, -1)
    sibling.fill_(-1)


def check_chains(
    *,
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
) -> None:
    width, said = candidates.shape[1], target_predict.flatten()
    for row, drafts in enumerate(candidates.tolist()):
        last = row * width
        accept_index[row, 0] = last
        num_accepted = 0
        while num_accepted + 1 < accept_index.shape[1] and drafts[num_accepted + 1] == said[last]:
            predicts[last] = said[last]
            num_accepted, last = num_accepted + 1, last + 1
            accept_index[row, num_accepted] = last
        predicts[last] = said[last]
        accept_token_num[row] = num_accepted


KERNELS = {
    "assign_draft_cache_locs_contiguous_cpu": read_next_places,
    "assign_extend_cache_locs_cpu": read_places,
    "assign_req_to_token_pool_cpu": write_places,
    "build_tree_kernel_efficient_cpu": build_chains,
    "copy_all_layer_kv_cache_cpu": leave,
    "fill_bonus_tokens_cpu": take_last,
    "verify_tree_greedy_cpu": check_chains,
}
"""By SGLang's names."""
