"""Memory for LoRA adapters on a CPU, where SGLang's layers pin tensors for a GPU that is not there.

SGLang's adapters, their memory pool and its torch-native products run unmodified.
"""

import functools

import torch


def register() -> None:
    """Let tensors that are to be pinned stay where they are."""
    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def _unpinned(make):
    @functools.wraps(make)
    def unpinned(*values, pin_memory=False, **options):
        return make(*values, **options)

    return unpinned
