"""Tensors of every kind that somebody may hand over: without bytes, of another make than weights are, and odd but good ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode


class Wrapper(Tensor):
    """Wraps a tensor, as quantized and asynchronous ones do, and has no memory."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Own(Tensor):
    """A subclass over memory of its own."""


def resized(tensor: Tensor, num_bytes: int) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def view_of_freed(tensor: Tensor) -> Tensor:
    flat = torch.cat([torch.zeros(64, dtype=tensor.dtype), tensor.flatten()])
    view = flat[64:].view(tensor.shape)
    flat.untyped_storage().resize_(0)
    return view


def fake(tensor: Tensor) -> Tensor:
    with FakeTensorMode():
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def with_one(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value  # which the engine holds, of every tensor
    return tensor


WITHOUT_BYTES: dict[str, Callable[[Tensor], Any]] = {
    "fake": fake,
    "fake parameter": lambda t: nn.Parameter(fake(t), requires_grad=False),
    "meta": lambda t: t.to("meta"),
    "freed": lambda t: resized(t, 0),
    "cut short": lambda t: resized(t, t.nbytes - 1),
    "view of what was freed": view_of_freed,
    "wrapper": Wrapper,
    "never stored": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "functional": torch._to_functional_tensor,
    "uninitialised": lambda t: nn.UninitializedParameter(requires_grad=False),
}
MISFITS: dict[str, Callable[[Tensor], Any]] = {
    "sparse": Tensor.to_sparse,
    "nested": lambda t: torch.nested.nested_tensor([t.float(), t.float()]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "other sign": torch._neg_view,
    "list": Tensor.tolist,
    "none": lambda t: None,
    "numpy": lambda t: t.float().numpy(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "bool": lambda t: t > 0,
    "int32": lambda t: t.to(torch.int32),
    "float64": Tensor.double,
    "complex": lambda t: t.to(torch.complex64),
    "no rows": lambda t: t[:0],
    "one row more": lambda t: torch.cat([t, t[:1]]),
    "one dimension more": lambda t: t[None],
    "one number": lambda t: t.flatten()[0],
}
NOT_FINITE: dict[str, Callable[[Tensor], Any]] = {
    "NaN": lambda t: with_one(t, float("nan")),
    "Inf": lambda t: with_one(t, float("inf")),
    "-Inf": lambda t: with_one(t, float("-inf")),
}
HARMLESS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t,
    "parameter": lambda t: nn.Parameter(t.clone()),
    "subclass": lambda t: t.clone().as_subclass(Own),
    "columns first": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
    "every second": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "off alignment": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "lazy clone": torch._lazy_clone,
    "made for inference": torch.inference_mode()(Tensor.clone),
    "float32": Tensor.float,
    "end of a larger storage": lambda t: torch.cat([torch.zeros(77, dtype=t.dtype), t.flatten()])[77:].view(t.shape),
}
