"""Models with loaders of their own, in the way of engines: built by a function, filled by `load_weights`."""

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from fp8refit.live.formats import BlockFormat
from fp8refit.live.slots import Inventory, TensorMeta
from fp8refit.ranks.target import Target
from fp8refit.tracing.proof import with_proof
from fp8refit.tracing.reading import read_inventory
from fp8refit.tracing.twin import EmptyOnMeta, Naming, Twin, trace_twin
from tests.tracing.models import FP8
from tests.tracing.twins import KERNEL, FakeKernelRules

BLOCK = (4, 4)
Load = Callable[[nn.Module, str, Tensor], None]


class SmallBlocks(FakeKernelRules):
    def kernel_of(self, module):
        return replace(KERNEL, format=BlockFormat(block_size=BLOCK))


class Linear(nn.Module):
    """A layer whose memory is not filled; quantized in blocks if it has a block size."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scales: tuple[int, ...] = ()):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
        if dtype is FP8:  # matrices, or stacks of them
            grid = scales or (*shape[:-2], *(-(-size // block) for size, block in zip(shape[-2:], BLOCK, strict=True)))
            self.weight_scale_inv = nn.Parameter(torch.empty(grid, dtype=torch.float32), requires_grad=False)


class Custom(nn.Module):
    """Some modules, and what a loader does with each tensor of a checkpoint.

    Args:
        modules: By name; dots make modules of modules.
        load: Loads one tensor.
    """

    def __init__(self, modules: dict[str, nn.Module], load: Load):
        super().__init__()
        for name, module in modules.items():
            *parents, leaf = name.split(".")
            holder = self
            for parent in parents:
                if parent not in holder._modules:
                    holder.add_module(parent, nn.Module())
                holder = holder._modules[parent]
            holder.add_module(leaf, module)
        self._load = load

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self._load(self, name, tensor)


def plainly(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Copy a tensor to the parameter of its name."""
    model.get_parameter(name).data.copy_(tensor)


def twin_of(make: Callable[[], nn.Module], sources: dict[str, tuple[int, ...]], **options) -> Twin:
    """The trace of a model's loader."""

    @contextmanager
    def build(mode: EmptyOnMeta):
        with mode:
            model = make()
        yield model

    naming = Naming(tensors={n: TensorMeta(shape=shape, dtype=torch.bfloat16) for n, shape in sources.items()})
    mode = EmptyOnMeta()
    with build(mode) as model:
        return trace_twin(model, naming, stored=BlockFormat(block_size=BLOCK), build=build, mode=mode, **options)


def inventory_of(live: nn.Module, twin: Twin) -> Inventory:
    """What is read of a live model, and can be proved."""
    rules = SmallBlocks()
    return with_proof(read_inventory(live, rules, twin), live, rules, twin)


def target_of(make: Callable[[], nn.Module], sources: dict[str, tuple[int, ...]], live=None, **options) -> Target:
    """A live engine of such a model, which may hold it in another form."""
    live, twin = live or make(), twin_of(make, sources, **options)
    for tensor in live.parameters():
        tensor.data.view(torch.uint8).zero_()
    return Target(lambda: inventory_of(live, twin), device=torch.device("cpu"), engine="custom", versions={})
