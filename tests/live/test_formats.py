"""A part of a format that nobody has decided about is refused by name wherever formats differ."""

import ast
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from fp8refit.bench.eager import eager_quantize
from fp8refit.checkpoint.outputs import Output, quantization_of
from fp8refit.fill.fitting import fit_weight
from fp8refit.fill.tasks import scale_problem
from fp8refit.kernels import compile_table, quantize_activations, quantize_blockwise
from fp8refit.kernels.reference import block_scales, quantize_reference
from fp8refit.kernels.reference_table import fits_scale_format
from fp8refit.kernels.rows import rows_of_all
from fp8refit.kernels.triton_groups import quantize_groups
from fp8refit.kernels.triton_launch import _arithmetic
from fp8refit.kernels.work import Task
from fp8refit.live.formats import (
    FLOAT_SCALES,
    PER_ROW,
    PER_TENSOR,
    WHOLE,
    AmaxOver,
    BlockFormat,
    Codes,
    Container,
    Placement,
    ScaleFormat,
    quantization_config,
)
from fp8refit.live.layout import SlotLayout
from fp8refit.live.slots import FP8_DTYPE, Op, Slot, TensorMeta
from fp8refit.tracing.stored import why_not_stored
from fp8refit.transport.collective.buckets import WireTensor
from tests.tracing.models import BlockLinear
from tests.tracing.twins import KERNEL, FakeKernelRules

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
PARTS = {"codes": Codes, "scale_format": ScaleFormat, "amax_over": AmaxOver, "placement": Placement}
SMALL = BlockFormat(block_size=(2, 2))
WEIGHT, CODES, SCALES = torch.ones(4, 4), torch.ones(4, 4).to(FP8_DTYPE), torch.ones(2, 2)


def imaginary(kind):
    """As if it were a member: of its own type, with a name, and equal to no other."""
    made = str.__new__(kind, "imaginary")
    made._name_, made._value_ = "IMAGINARY", "imaginary"
    return made


def task(op, block_format):
    source, target = {
        Op.QUANTIZE: (WEIGHT, CODES.clone()),
        Op.COPY_CODES: (CODES, CODES.clone()),
        Op.COPY_SCALES: (SCALES, SCALES.clone()),
    }[op]
    scale = SCALES.clone() if op is Op.QUANTIZE else None
    return Task(op=op, source=source, offset=(0, 0), target=target, scale=scale, format=block_format)


def on_cpu(op):
    return lambda block_format: compile_table([task(op, block_format)], CPU)


def on_gpu(op):
    return lambda block_format: rows_of_all([task(op, block_format)], [0], None)


def sent(block_format):
    return WireTensor(name="w", shape=(4, 4), dtype="float8_e4m3fn", format=block_format, row_step=2).metas


def fitted(block_format):
    slot = Slot(name="w", full_shape=(4, 4), weight=CODES, scale=SCALES, format=block_format)
    return fit_weight(TensorMeta.of(CODES), slot)


def told(block_format):
    slot = Slot(name="w", full_shape=(4, 4), weight=CODES, scale=SCALES, format=block_format)
    return SlotLayout.of(slot)


def read(block_format):
    layer = BlockLinear(kernel=replace(KERNEL, format=block_format))
    return why_not_stored(FakeKernelRules(), "layer", layer, dict(layer.named_parameters()))


def booted(block_format):
    meta = TensorMeta.of(WEIGHT)
    return quantization_of([Output(name="w", source=meta, dtype=FP8_DTYPE, format=block_format, written=("w",))])


DECIDED = {
    "codes": [
        lambda each: each.codes.dtype,
        lambda each: block_scales(SCALES, each),
        lambda each: quantize_reference(WEIGHT, each),
        lambda each: quantize_blockwise(WEIGHT, format=each),
        lambda each: quantize_activations(WEIGHT, each),
        lambda each: eager_quantize(WEIGHT.bfloat16(), each),
        _arithmetic,
        *(where(op) for where, op in product((on_cpu, on_gpu), (Op.QUANTIZE, Op.COPY_CODES))),
        sent,
        told,
        fitted,
        booted,
        quantization_config,
    ],
    "scale_format": [
        lambda each: each.scale_format.dtype,
        lambda each: each.scale_format.amax_floor,
        lambda each: each.scale_format.has_powers_of_two,
        lambda each: block_scales(SCALES, each),
        lambda each: quantize_reference(WEIGHT, each),
        lambda each: quantize_blockwise(WEIGHT, format=each),
        lambda each: quantize_activations(WEIGHT, each),
        lambda each: eager_quantize(WEIGHT.bfloat16(), each),
        lambda each: fits_scale_format(SCALES, each.scale_format),
        lambda each: scale_problem("a.weight_scale_inv", each.scale_format),
        _arithmetic,
        on_cpu(Op.COPY_SCALES),
        on_gpu(Op.COPY_SCALES),
        sent,
        read,
        booted,
        quantization_config,
    ],
    "amax_over": [
        lambda each: each.block_at((0, 0)),
        lambda each: each.holds_whole_blocks((0, 0), (4, 4), (4, 4)),
        lambda each: quantize_reference(WEIGHT, each),
        _arithmetic,
        lambda each: WireTensor(name="w", shape=(4, 4), dtype="float8_e4m3fn", format=each, row_step=2).parts(
            (0, 0), (4, 4), 0
        ),
    ],
    "placement": [
        *(where(op) for where, op in product((on_cpu, on_gpu), (Op.QUANTIZE, Op.COPY_CODES, Op.COPY_SCALES))),
        lambda each: quantize_blockwise(WEIGHT, format=each),
        told,
        read,
    ],
}
FITTING = {"codes": [Codes.E4M3], "scale_format": FLOAT_SCALES, "placement": [Placement.ROW_MAJOR]}
"""Members that go with blocks of several rows; `test_groups_of_columns.py` has the others."""
CASES = [(part, decide) for part, decisions in DECIDED.items() for decide in decisions]


@pytest.mark.parametrize(("part", "decide"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_whoever_decides_by_a_part_of_a_format_refuses_one_that_it_does_not_know(part, decide):
    small = replace(SMALL, block_size=(1, 2)) if part == "amax_over" else SMALL
    for known in FITTING.get(part, PARTS[part]):
        decide(replace(small, **{part: known}))
    with pytest.raises((AssertionError, ValidationError), match=rf"{PARTS[part].__name__}\.IMAGINARY"):
        decide(replace(small, **{part: imaginary(PARTS[part])}))


def test_so_does_the_kernel_of_groups():
    with pytest.raises(AssertionError, match=r"ScaleFormat\.IMAGINARY"):
        quantize_groups(WEIGHT, imaginary(ScaleFormat))


@pytest.mark.parametrize(
    ("container", "block_format", "chosen"),
    [
        (Container.FP8, PER_ROW, Container.COMPRESSED_TENSORS),
        (Container.MODELOPT, PER_ROW, Container.COMPRESSED_TENSORS),
        (Container.MODELOPT, PER_TENSOR, Container.FP8),
        *((container, BlockFormat(), container) for container in Container),
        *((container, PER_TENSOR, container) for container in (Container.FP8, Container.COMPRESSED_TENSORS)),
    ],
)
def test_a_container_without_a_form_for_a_format_gives_way_to_one_that_has_it(container, block_format, chosen):
    assert container.or_other(block_format) is chosen


def source_trees():
    for folder in ("fp8refit", "adapters"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.relative_to(ROOT), ast.parse(file.read_text())


def names_a_member(node):
    return any(f"{kind.__name__}." in ast.unparse(node) for kind in PARTS.values())


def test_nobody_compares_a_part_with_one_member_and_takes_all_others_for_the_rest():
    found = [
        f"{file}:{node.lineno}"
        for file, tree in source_trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and names_a_member(node)
    ]
    assert found == []


def test_every_match_over_members_names_what_is_left_to_mypy():
    """`assert_never` makes mypy name a member that no case takes, and raises if one comes all the same."""
    matches = [
        (f"{file}:{node.lineno}", ast.unparse(node.subject), ast.unparse(node.cases[-1]))
        for file, tree in source_trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Match) and any(names_a_member(case.pattern) for case in node.cases)
    ]
    assert len(matches) >= 12
    assert [place for place, subject, last in matches if last != f"case _:\n    assert_never({subject})"] == []


@pytest.mark.parametrize(
    "said",
    [
        *({part: "imaginary"} for part in PARTS),
        {"block_size": [0, 128]},
        {"block_size": [128]},
        {"second_level": "fp32"},
    ],
    ids=str,
)
def test_a_message_or_file_with_what_is_not_known_is_refused(said):
    with pytest.raises(ValidationError):
        TypeAdapter(BlockFormat).validate_python(said)
    assert TypeAdapter(BlockFormat).validate_python({"block_size": [64, 32]}) == BlockFormat(block_size=(64, 32))


def test_a_block_of_which_ranks_hold_parts_has_one_row():
    """A rank that holds some rows of a higher one would take the maximum of those."""
    with pytest.raises(ValueError, match="has one row"):
        BlockFormat(amax_over=AmaxOver.WHOLE_BLOCK)


@pytest.mark.parametrize(
    ("block_size", "said"), [((1, WHOLE), "row"), ((WHOLE, 1), "allx1 block"), ((WHOLE, WHOLE), "weight")]
)
def test_a_scale_may_be_that_of_a_row_a_column_or_the_whole_matrix(block_size, said):
    torch.manual_seed(0)
    weight, block_format = torch.randn(6, 40), BlockFormat(block_size=block_size)
    sides = tuple(min(size, length) for size, length in zip(block_size, weight.shape, strict=True))
    codes, scale, _ = quantize_reference(weight, block_format)
    expected, expected_scale, _ = quantize_reference(weight, BlockFormat(block_size=sides))
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scale, expected_scale)
    assert scale.shape == block_format.scale_shape(weight.shape) == (6 // sides[0], 40 // sides[1])
    assert str(block_format) == f"fp32 scales per {said}"
    whole = Task(op=Op.QUANTIZE, source=weight, offset=(0, 0), target=codes, scale=scale, format=block_format)
    refused = pytest.raises(AssertionError, match="no kernel") if block_size[0] == WHOLE else nullcontext()
    with refused:
        rows_of_all([whole], [0], None)


@pytest.mark.parametrize(
    ("start", "shape", "block", "is_whole"),
    [
        ((0, 0), (4, 6), (0, 0), True),
        ((4, 2), (2, 4), (2, 1), True),
        ((4, 2), (1, 4), (2, 1), False),
        ((1, 0), (3, 6), None, False),
        ((0, 3), (4, 3), None, False),
    ],
)
def test_slices_may_cut_blocks(start, shape, block, is_whole):
    assert SMALL.block_at(start) == block
    assert SMALL.block_at((3, *start)) == (block and (3, *block))
    assert SMALL.holds_whole_blocks(start, shape, (6, 6)) is is_whole
