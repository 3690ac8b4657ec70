"""A scale format that nobody has decided about is refused by name wherever formats differ."""

import ast
from pathlib import Path

import pytest
import torch

from fp8refit.bench.eager import eager_quantize
from fp8refit.fill.kernels.activations import quantize_activations
from fp8refit.fill.kernels.reference import block_scales, quantize_reference
from fp8refit.fill.kernels.reference_table import fits_scale_format
from fp8refit.fill.kernels.triton_groups import quantize_groups
from fp8refit.fill.kernels.triton_launch import _arithmetic
from fp8refit.fill.tasks import scale_problem
from fp8refit.live.slots import ScaleFormat
from fp8refit.precision.weights import BlockFormat

ROOT = Path(__file__).parents[2]
WEIGHT, AMAX = torch.ones(4, 4), torch.ones(2, 2)


def imaginary() -> ScaleFormat:
    """As if it were a member: of its own type, with a name, and equal to no other."""
    made = str.__new__(ScaleFormat, "e4m3")
    made._name_, made._value_ = "E4M3", "e4m3"
    return made


@pytest.mark.parametrize(
    "decide",
    [
        lambda unknown: unknown.amax_floor,
        lambda unknown: unknown.has_powers_of_two,
        lambda unknown: block_scales(AMAX, unknown),
        lambda unknown: quantize_reference(WEIGHT, (2, 2), unknown),
        lambda unknown: fits_scale_format(AMAX, unknown),
        lambda unknown: quantize_activations(WEIGHT, unknown, group_size=2),
        lambda unknown: _arithmetic(unknown),
        lambda unknown: scale_problem("a.weight_scale_inv", unknown),
        lambda unknown: BlockFormat(scale_format=unknown, block_size=(2, 2)).is_ue8m0,
        lambda unknown: eager_quantize(WEIGHT.bfloat16(), (2, 2), unknown),
    ],
)
def test_whoever_decides_by_the_format_refuses_one_that_it_does_not_know(decide):
    for known in ScaleFormat:
        decide(known)
    with pytest.raises(AssertionError, match=r"ScaleFormat\.E4M3"):
        decide(imaginary())


def test_so_does_the_kernel_of_groups():
    with pytest.raises(AssertionError, match=r"ScaleFormat\.E4M3"):
        quantize_groups(WEIGHT, imaginary())


def test_nobody_compares_a_format_with_one_member_and_takes_all_others_for_the_rest():
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for folder in ("fp8refit", "adapters")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Compare) and "ScaleFormat." in ast.unparse(node)
    ]
    assert found == []
