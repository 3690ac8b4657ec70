"""Memory for LoRA adapters on a CPU, where SGLang's layers pin tensors for a GPU that is not there.

SGLang's adapters, their memory pool and its torch-native products run unmodified.
"""

import functools
import os

import torch

ASKS = "FP8REFIT_TEST_LORA"
"""Set for engines with adapters: others need torch's own functions, which the twin of a draft tells apart."""


def register() -> None:
    """Let tensors that are to be pinned stay where they are, if adapters are to be served."""
    if ASKS not in os.environ:
        return
    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def _unpinned(make):
    @functools.wraps(make)
    def unpinned(*values, pin_memory=False, **options):
        return make(*values, **options)

    return unpinned
