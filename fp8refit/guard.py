"""Whether a state dict is laid out as an earlier one, asked of torch in one call instead of tensor by tensor in Python."""

from collections.abc import Sequence
from importlib import import_module
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fp8refit.tensors import has_memory

Addresses: TypeAlias = npt.NDArray[np.int64]

try:
    # What compiled code holds its inputs against. Private to torch, and a short cut only: without it nothing is recognised.
    _tensor_guards: Any = import_module("torch._C._dynamo.guards").TensorGuards
except (ImportError, AttributeError):
    _tensor_guards = None


class LayoutGuard:
    """Recognises tensors of the names, types, shapes, strides, dtypes and devices of those that it was made of.

    Takes 0.2 us a tensor, a fifth of looking at each of them: a model of experts has 18 000. Holds no tensor.

    Args:
        names: By which they were sent.
        tensors: All of which can be read.

    Attributes:
        addresses: Where the tensors lie that it was made of, or that it recognised last.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self._names = list(names)
        self._guards = None
        self.addresses = addresses_of(tensors)
        if _tensor_guards is not None and tensors:
            self._guards = _tensor_guards(
                *tensors,
                dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
                dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
            )

    def holds(self, names: Sequence[str], tensors: Sequence[Tensor]) -> bool:
        """Whether `names` and `tensors` are laid out so, in the same order, and all of them can be read.

        False says nothing; alignment is not looked at. Memory that lies where it lay is what it was: to shrink is to move.
        """
        if self._guards is None or self._names != names:
            return False
        # torch asks a nested tensor for its strides, and ends the process when that raises.
        if any(map(getattr, tensors, repeat("is_nested"), repeat(True))) or not self._guards.check(*tensors):
            return False
        addresses = addresses_of(tensors)
        if not all(has_memory(tensors[place]) for place in np.flatnonzero(addresses != self.addresses).tolist()):
            return False
        self.addresses = addresses
        return True


def addresses_of(tensors: Sequence[Tensor]) -> Addresses:
    """Where each tensor begins."""
    return np.fromiter(map(Tensor.data_ptr, tensors), dtype=np.int64, count=len(tensors))
