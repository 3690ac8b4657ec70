"""Loaders that do more than copy: what is not refused, a refit leaves exactly as the loader does.

Their truth is what they load, of values that no proof has seen.
"""

import threading

import hypothesis.strategies as st
import torch
from hypothesis import event, example, given
from torch import Tensor, nn

from fp8refit.config import RefitConfig
from fp8refit.fill.kernels import quantize_blockwise
from fp8refit.sources.source import MappingSource
from tests.live.tracing.custom import BLOCK, Custom, Linear, target_of
from tests.live.tracing.models import FP8

ROWS, COLUMNS = 8, 12
NAMES = ("layers.0.plain.weight", "layers.0.fp8.weight", "layers.1.plain.weight", "layers.1.fp8.weight", "embed.weight")


def weight_of(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name).data


def copy(model, name: str, tensor: Tensor, other: str) -> None:
    weight_of(model, name).copy_(tensor)


def copy_halves(model, name: str, tensor: Tensor, other: str) -> None:
    for into, part in zip(weight_of(model, name).chunk(2), tensor.chunk(2), strict=True):
        into.copy_(part)


def copy_in_turn(model, name: str, tensor: Tensor, other: str) -> None:
    weight_of(model, name).copy_(tensor.view(2, ROWS // 2, COLUMNS).transpose(0, 1).reshape(ROWS, COLUMNS))


def copy_late(model, name: str, tensor: Tensor, other: str) -> None:
    """From an attribute that was not there before."""
    model.late = tensor.clone()
    weight_of(model, name).copy_(model.late)


def copy_in_thread(model, name: str, tensor: Tensor, other: str) -> None:
    in_thread(lambda: weight_of(model, name).copy_(tensor))


def through(*dtypes: torch.dtype):
    def do(model, name: str, tensor: Tensor, other: str) -> None:
        for dtype in dtypes:
            tensor = tensor.to(dtype)
        weight_of(model, name).copy_(tensor)

    return do


def swap_halves(model, name: str, tensor: Tensor, other: str) -> None:
    weight = weight_of(model, name)
    kept, half = weight.clone(), ROWS // 2
    weight[:half].copy_(kept[half:])
    weight[half:].copy_(kept[:half])


def reverse_by_index(model, name: str, tensor: Tensor, other: str) -> None:
    weight = weight_of(model, name)
    weight[torch.arange(ROWS)] = weight.clone()[torch.arange(ROWS).flip(0)]


def add_in_thread(model, name: str, tensor: Tensor, other: str) -> None:
    in_thread(lambda: weight_of(model, name).add_(1))


def add_to(model, name: str, tensor: Tensor, other: str) -> None:
    weight_of(model, name).add_(1)


def write_out(model, name: str, tensor: Tensor, other: str) -> None:
    torch.mul(weight_of(model, name).clone(), 2, out=weight_of(model, name))


def write_many(model, name: str, tensor: Tensor, other: str) -> None:
    torch._foreach_mul_([torch.ones(1), weight_of(model, name)], 2)


def replace_data(model, name: str, tensor: Tensor, other: str) -> None:
    parameter = model.get_parameter(name)
    parameter.data = parameter.data * 2


def replace_parameter(model, name: str, tensor: Tensor, other: str) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(weight_of(model, name) + 1, requires_grad=False))


def take_from_other(model, name: str, tensor: Tensor, other: str) -> None:
    if other != name:
        weight_of(model, name).copy_(weight_of(model, other))


def double_before(model, name: str, tensor: Tensor, other: str) -> None:
    tensor.mul_(2)


def clear(model, name: str, tensor: Tensor, other: str) -> None:
    weight_of(model, name)[1:3].zero_()


def in_thread(do) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


FIRST = {
    "copy": copy,
    "copy halves": copy_halves,
    "copy in turn": copy_in_turn,
    "copy late": copy_late,
    "copy in a thread": copy_in_thread,
    "through FP32": through(torch.float32),
    "through FP8": through(FP8, torch.bfloat16),
    "through integers": through(torch.int32),
    "through FP16": through(torch.float16),
}
THEN = {
    "swap halves": swap_halves,
    "reverse": reverse_by_index,
    "add": add_to,
    "add in a thread": add_in_thread,
    "out=": write_out,
    "foreach": write_many,
    "data": replace_data,
    "parameter": replace_parameter,
    "from another": take_from_other,
    "clear": clear,
    "double what came": double_before,
}
STEPS = st.tuples(
    st.sampled_from(sorted(FIRST)),
    st.lists(st.tuples(st.sampled_from(sorted(THEN)), st.sampled_from(NAMES)), max_size=2),
)


def model_of(load, *, is_quantized: bool) -> Custom:
    """The twin of an engine that quantizes after loading, or its live model."""
    modules = {name.removesuffix(".weight"): Linear(ROWS, COLUMNS) for name in NAMES}
    if is_quantized:
        modules |= {name: Linear(ROWS, COLUMNS, dtype=FP8) for name in modules if name.endswith("fp8")}
    return Custom(modules, load)


@given(st.dictionaries(st.sampled_from(NAMES), STEPS, max_size=3), st.integers(0, 1 << 16))
@example({NAMES[0]: ("copy", [("swap halves", NAMES[0])])}, 0)
@example({NAMES[2]: ("copy", [("data", NAMES[0])]), NAMES[0]: ("copy", [("data", NAMES[0])])}, 0)
@example({NAMES[4]: ("copy", [("from another", NAMES[0])])}, 0)
@example({NAMES[1]: ("through FP8", []), NAMES[3]: ("through FP8", [])}, 0)
@example({NAMES[0]: ("copy in a thread", [])}, 0)
@example({NAMES[0]: ("copy", [("out=", NAMES[0])])}, 0)
@example({NAMES[0]: ("copy", [("foreach", NAMES[0])])}, 0)
@example({NAMES[0]: ("copy in turn", []), NAMES[1]: ("copy in turn", [])}, 0)
def test_what_is_not_refused_is_what_the_loader_loads(hows, seed):
    def load(model, name, tensor):
        first, then = hows.get(name, ("copy", []))
        FIRST[first](model, name, tensor, name)
        for step, other in then:
            THEN[step](model, name, tensor, other)

    shapes = dict.fromkeys(NAMES, (ROWS, COLUMNS))
    target = target_of(lambda: model_of(load, is_quantized=False), shapes, live=model_of(load, is_quantized=True))
    refusals = target.layout().refusals
    event("refused" if refusals else "refitted")
    if refusals:
        assert any(how != ("copy", []) for how in hows.values())
        return
    generator = torch.Generator().manual_seed(seed)
    policy = {name: 8 * torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16) for name in NAMES}
    target.write(target.prepare(MappingSource(policy), RefitConfig()))
    expected = model_of(load, is_quantized=False)
    expected.load_weights((name, tensor.clone()) for name, tensor in policy.items())
    live = {entry.name: entry.tensor for entry in target.live.read().live}
    for name in NAMES:
        values = expected.get_parameter(name).data
        if live[name].dtype is FP8:
            codes, scale = quantize_blockwise(values, block_size=BLOCK)
            assert torch.equal(live[name].view(torch.uint8), codes.view(torch.uint8)), name
            assert torch.equal(live[f"{name}_scale_inv"], scale), name
        else:
            assert torch.equal(live[name], values), name
