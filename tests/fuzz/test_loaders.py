"""Loaders that do more than copy: what is not refused, a refit leaves exactly as the loader does.

Their truth is what they load, of values that no proof has seen.
"""

import hypothesis.strategies as st
import torch
from hypothesis import event, example, given
from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.kernels import quantize_blockwise
from fp8refit.sources.source import MappingSource
from tests.tracing.custom import BLOCK, Custom, Linear, plainly, target_of
from tests.tracing.models import FP8
from tests.tracing.tricks import (
    cast,
    in_thread,
    replace_data,
    replace_parameter,
    swap_halves,
    weight_of,
    write_in_thread,
    write_many,
    write_out,
)

ROWS, COLUMNS = 8, 12
NAMES = ("layers.0.plain.weight", "layers.0.fp8.weight", "layers.1.plain.weight", "layers.1.fp8.weight", "embed.weight")


def copy_halves(model, name: str, tensor: Tensor) -> None:
    for into, part in zip(weight_of(model, name).chunk(2), tensor.chunk(2), strict=True):
        into.copy_(part)


def copy_in_turn(model, name: str, tensor: Tensor) -> None:
    plainly(model, name, tensor.view(2, ROWS // 2, COLUMNS).transpose(0, 1).reshape(ROWS, COLUMNS))


def copy_late(model, name: str, tensor: Tensor) -> None:
    """From an attribute that was not there before."""
    model.late = tensor.clone()
    plainly(model, name, model.late)


def reverse_by_index(model, name: str, tensor: Tensor) -> None:
    weight = weight_of(model, name)
    weight[torch.arange(ROWS)] = weight.clone()[torch.arange(ROWS).flip(0)]


def take_from(other: str, model, name: str) -> None:
    if other != name:
        plainly(model, name, weight_of(model, other))


FIRST = {
    "copy": plainly,
    "copy halves": copy_halves,
    "copy in turn": copy_in_turn,
    "copy late": copy_late,
    "copy in a thread": lambda model, name, tensor: in_thread(lambda: plainly(model, name, tensor)),
    "through FP32": cast(torch.float32),
    "through FP8": cast(FP8, torch.bfloat16),
    "through integers": cast(torch.int32),
    "through FP16": cast(torch.float16),
}
THEN = {
    "swap halves": swap_halves,
    "reverse": reverse_by_index,
    "add": lambda model, name, tensor: weight_of(model, name).add_(1),
    "add in a thread": write_in_thread,
    "out=": write_out,
    "foreach": write_many,
    "data": replace_data,
    "parameter": replace_parameter,
    "clear": lambda model, name, tensor: weight_of(model, name)[1:3].zero_(),
    "double what came": lambda model, name, tensor: tensor.mul_(2),
}
FROM_ANOTHER = "from another"
"""What takes the name of another weight beside."""
STEPS = st.tuples(
    st.sampled_from(sorted(FIRST)),
    st.lists(st.tuples(st.sampled_from(sorted([*THEN, FROM_ANOTHER])), st.sampled_from(NAMES)), max_size=2),
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
@example({NAMES[2]: ("copy", [("add in a thread", NAMES[2])])}, 0)
@example({NAMES[0]: ("copy", [("out=", NAMES[0])])}, 0)
@example({NAMES[0]: ("copy", [("foreach", NAMES[0])])}, 0)
@example({NAMES[0]: ("copy in turn", []), NAMES[1]: ("copy in turn", [])}, 0)
def test_what_is_not_refused_is_what_the_loader_loads(hows, seed):
    def load(model, name, tensor):
        first, then = hows.get(name, ("copy", []))
        FIRST[first](model, name, tensor)
        for step, other in then:
            if step == FROM_ANOTHER:
                take_from(other, model, name)
            else:
                THEN[step](model, name, tensor)

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
