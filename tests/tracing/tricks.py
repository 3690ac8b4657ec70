"""What loaders do with a weight once it is copied, in ways that a trace cannot follow, or hardly."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tests.tracing.custom import Load, plainly


def weight_of(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name).data


def in_thread(do: Callable[[], object]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def unseen(do: Callable[[], object]) -> None:
    """Do something where nothing watches, as compiled code or a thread that ran before would."""
    with _disable_current_modes():
        do()


def cast(*dtypes: torch.dtype) -> Load:
    """Copy a tensor by way of other dtypes."""

    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        for dtype in dtypes:
            tensor = tensor.to(dtype)
        plainly(model, name, tensor)

    return load


def swap_halves(model: nn.Module, name: str, tensor: Tensor) -> None:
    weight = weight_of(model, name)
    kept, half = weight.clone(), len(weight) // 2
    weight[:half].copy_(kept[half:])
    weight[half:].copy_(kept[:half])


def write_out(model: nn.Module, name: str, tensor: Tensor) -> None:
    weight = weight_of(model, name)
    torch.mul(weight.clone(), 2, out=weight)


def write_many(model: nn.Module, name: str, tensor: Tensor) -> None:
    torch._foreach_mul_([torch.ones(1), weight_of(model, name)], 2)


def write_in_thread(model: nn.Module, name: str, tensor: Tensor) -> None:
    in_thread(lambda: weight_of(model, name).add_(1))


def write_unseen(model: nn.Module, name: str, tensor: Tensor) -> None:
    unseen(lambda: weight_of(model, name).add_(1))


def replace_data(model: nn.Module, name: str, tensor: Tensor) -> None:
    parameter = model.get_parameter(name)
    parameter.data = parameter.data * 8


def replace_parameter(model: nn.Module, name: str, tensor: Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(weight_of(model, name) + 1, requires_grad=False))
