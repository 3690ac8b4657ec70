"""How weights are held quantized. No torch operation runs here.

`BlockFormat` describes one format whole. Whoever decides by a part of it asks a property, or matches every member. So mypy
names each place that lacks a new member, and until then the member is refused there by name.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import assert_never

import torch
from pydantic import ConfigDict

MARLIN_TILE = 64, 16
"""Rows and columns of one of Marlin's tiles."""
WHOLE = 2**31 - 1
"""A side of a block that is as long as the matrix: `(1, WHOLE)` is one scale per row, `(WHOLE, WHOLE)` one for all."""


SCALE_SUFFIX = "_scale_inv"
"""A block-FP8 checkpoint stores the scales of `X`, the multipliers that dequantize it, as `X_scale_inv`. Here, they have this
name in every container."""
GLOBAL_SUFFIX = "_global_scale"
"""What here follows the name of a weight in that of its one scale beside those of blocks."""


class Codes(StrEnum):
    """What stands for one value."""

    E4M3 = "e4m3"
    """One byte, at most 448."""
    E2M1 = "e2m1"
    """Half a byte, at most 6: two neighbors of a row in a byte, the first in its low half."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that holds them."""
        match self:
            case Codes.E4M3:
                return torch.float8_e4m3fn
            case Codes.E2M1:
                return torch.uint8
            case _:
                assert_never(self)

    @property
    def per_element(self) -> int:
        """How many stand in one element of that tensor."""
        match self:
            case Codes.E4M3:
                return 1
            case Codes.E2M1:
                return 2
            case _:
                assert_never(self)


class ScaleFormat(StrEnum):
    """How a block's scale follows from `amax`, its largest magnitude, and as what it is stored."""

    FP32 = "fp32"
    """Any float32: `amax / 448`."""
    UE8M0 = "ue8m0"
    """Powers of two: the smallest one with `amax / scale <= 464`."""
    FP32_FLOORED = "fp32_floored"
    """As FP32, with the higher floor of vLLM's own quantizer."""
    FP32_RECIPROCAL = "fp32_reciprocal"
    """As FP32_FLOORED, but `amax * (1 / 448)`: what torch computes on a GPU where vLLM's quantizer divides by 448."""
    FP32_DIVIDING = "fp32_dividing"
    """As FP32, with the floor of vLLM's quantizer per channel. Codes are values divided by the scale, not multiplied by its
    reciprocal."""
    MX_CEIL = "mx_ceil"
    """Bytes of E8M0, 127 more than the exponent of a power of two: the smallest one with `amax / scale <= 448`."""
    MX_FLOOR = "mx_floor"
    """Bytes of E8M0: the largest power of two that is at most `amax`, over 256, as OCP has it. Codes are at most 448."""
    MX_UNIT = "mx_unit"
    """Bytes of E8M0: the largest power of two that is at most `amax`."""
    NV_E4M3 = "nv_e4m3"
    """Scales of two levels. One for each weight: its `amax / 2688`. One for each block in E4M3: `amax / 6` over that, within
    [2^-9, 448], and 1 if the block is zeros. Codes are values divided by the product of both."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that holds them."""
        match self:
            case (
                ScaleFormat.FP32
                | ScaleFormat.UE8M0
                | ScaleFormat.FP32_FLOORED
                | ScaleFormat.FP32_RECIPROCAL
                | ScaleFormat.FP32_DIVIDING
            ):
                return torch.float32
            case ScaleFormat.MX_CEIL | ScaleFormat.MX_FLOOR | ScaleFormat.MX_UNIT:
                return torch.uint8
            case ScaleFormat.NV_E4M3:
                return torch.float8_e4m3fn
            case _:
                assert_never(self)

    @property
    def power(self) -> tuple[int, int] | None:
        """How the exponent of a scale that is a power of two follows from that of `amax`: it is this much less, and one more if
        the 23 bits of the mantissa of `amax` are above the second number. None for other scales.
        """
        match self:
            case ScaleFormat.UE8M0:
                return 8, 0x680000  # 464 = 1.8125 * 2**8 is the largest value that still rounds to 448 in E4M3
            case ScaleFormat.MX_CEIL:
                return 8, 0x600000  # 448 = 1.75 * 2**8
            case ScaleFormat.MX_FLOOR:
                return 8, 0x7FFFFF
            case ScaleFormat.MX_UNIT:
                return 0, 0x7FFFFF
            case (
                ScaleFormat.FP32
                | ScaleFormat.FP32_FLOORED
                | ScaleFormat.FP32_RECIPROCAL
                | ScaleFormat.FP32_DIVIDING
                | ScaleFormat.NV_E4M3
            ):
                return None
            case _:
                assert_never(self)

    @property
    def amax_floor(self) -> float:
        """The least `amax`: blocks of zeros or of smaller values get its scale. With two levels, that of a whole weight."""
        match self:
            case ScaleFormat.FP32:
                return 1e-10
            case ScaleFormat.UE8M0 | ScaleFormat.FP32_FLOORED | ScaleFormat.FP32_RECIPROCAL:
                return 1e-4
            case ScaleFormat.FP32_DIVIDING:
                return 2.0**-9
            case ScaleFormat.MX_CEIL | ScaleFormat.MX_FLOOR | ScaleFormat.MX_UNIT:
                return 2.0**-126
            case ScaleFormat.NV_E4M3:
                return 2.0**-100
            case _:
                assert_never(self)

    @property
    def has_powers_of_two(self) -> bool:
        """Whether every scale is a power of two, those of a kernel's other operand too."""
        return self.power is not None

    @property
    def has_exponents(self) -> bool:
        """Whether bytes of E8M0 are stored, not float32."""
        return self.dtype is torch.uint8

    @property
    def has_two_levels(self) -> bool:
        """Whether blocks have small scales, and the weight has one more for all."""
        return self.dtype is torch.float8_e4m3fn

    @property
    def divides(self) -> bool:
        """Whether codes are values divided by the scale. Others multiply by its reciprocal, and differ at midpoints."""
        match self:
            case ScaleFormat.FP32_DIVIDING | ScaleFormat.NV_E4M3:
                return True
            case (
                ScaleFormat.FP32
                | ScaleFormat.UE8M0
                | ScaleFormat.FP32_FLOORED
                | ScaleFormat.FP32_RECIPROCAL
                | ScaleFormat.MX_CEIL
                | ScaleFormat.MX_FLOOR
                | ScaleFormat.MX_UNIT
            ):
                return False
            case _:
                assert_never(self)


FLOAT_SCALES = tuple(each for each in ScaleFormat if each.dtype is torch.float32)
"""Formats whose scales are float32, over blocks of any size."""


class AmaxOver(StrEnum):
    """Over what a block's largest magnitude is taken if several ranks hold parts of a matrix."""

    OWN_SLICE = "own_slice"
    """What the rank itself holds, whose first block begins at its first element."""
    WHOLE_BLOCK = "whole_block"
    """The matrix's own block, of which a rank may hold some columns: its scale is the same on every rank."""

    @property
    def reaches_beyond(self) -> bool:
        """Whether the scale of what a rank holds also covers what it does not hold."""
        match self:
            case AmaxOver.OWN_SLICE:
                return False
            case AmaxOver.WHOLE_BLOCK:
                return True
            case _:
                assert_never(self)


class Placement(StrEnum):
    """Where codes and scales lie in the memory that a kernel reads."""

    ROW_MAJOR = "row_major"
    """In rows, as checkpoints hold them."""
    MARLIN = "marlin"
    """In Marlin's tiles of 64 rows and 16 columns, (K / 16, N / 64, bytes of 1024 codes); scales as (blocks per row, N / 64,
    64). In a tile, the bits of a place are those of row and column in another order; see `kernels/placement.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """How a matrix is held quantized. The default is that of block-FP8 checkpoints."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    scale_format: ScaleFormat = ScaleFormat.FP32
    block_size: tuple[int, int] = (128, 128)
    """Rows and columns that share a scale; blocks at the edges may be smaller."""
    amax_over: AmaxOver = AmaxOver.OWN_SLICE
    codes: Codes = Codes.E4M3
    placement: Placement = Placement.ROW_MAJOR

    def __post_init__(self) -> None:
        sides: object = self.block_size
        is_pair = isinstance(sides, (tuple, list)) and len(sides) == 2
        if not is_pair or not all(isinstance(side, int) and side >= 1 for side in self.block_size):
            raise ValueError(f"block_size is {sides!r}; it must be two whole numbers of at least 1")
        object.__setattr__(self, "block_size", tuple(self.block_size))
        if self.scale_format.has_exponents and not self.has_groups:
            raise ValueError(f"block_size is {sides!r}; scales of E8M0 are those of several blocks per row, as (1, 32)")
        has_two, in_one = self.scale_format.has_two_levels, self.codes.per_element
        if has_two != (in_one == 2) or (has_two and not (self.has_groups and self.block_size[1] % in_one == 0)):
            raise ValueError(f"codes are {self.codes} with {self}; E2M1 has NVFP4's scales, in blocks such as (1, 16)")
        if self.block_size[0] != 1 and not self.is_shared and self.amax_over.reaches_beyond:
            raise ValueError(
                f"block_size is {sides!r}; a block of which ranks hold parts has one row, or is the matrix"
            )

    @property
    def has_rows(self) -> bool:
        """Whether it has one scale per row."""
        return self.block_size == (1, WHOLE)

    @property
    def is_shared(self) -> bool:
        """Whether it has one scale per weight, which all matrices that are fused into one share."""
        return self.block_size == (WHOLE, WHOLE)

    @property
    def needs_maximum(self) -> bool:
        """Whether scales follow from the largest magnitude of the weight, and of all matrices that are fused into one."""
        return self.is_shared or self.scale_format.has_two_levels

    @property
    def needs_own_maximum(self) -> bool:
        """Whether what a kernel holds of the scales also follows from the largest magnitude of the rank's own slice."""
        return self.scale_format.has_two_levels and self.is_tiled

    @property
    def has_groups(self) -> bool:
        """Whether it has several scales per row."""
        return self.block_size[0] == 1 and self.block_size[1] != WHOLE

    @property
    def is_tiled(self) -> bool:
        """Whether codes lie in tiles of a kernel's own, not in rows."""
        match self.placement:
            case Placement.ROW_MAJOR:
                return False
            case Placement.MARLIN:
                return True
            case _:
                assert_never(self.placement)

    @property
    def tile_elements(self) -> int:
        """Elements of the tensor that holds the codes of one of Marlin's tiles."""
        return prod(MARLIN_TILE) // self.codes.per_element

    def shape_of(self, weight: Sequence[int]) -> tuple[int, ...]:
        """The shape of a matrix, or of a stack of them, that is held in memory of some shape."""
        match self.placement:
            case Placement.ROW_MAJOR:
                return (*weight[:-1], weight[-1] * self.codes.per_element) if len(weight) > 1 else tuple(weight)
            case Placement.MARLIN:
                *stack, columns, rows, _ = weight
                return (*stack, rows * MARLIN_TILE[0], columns * MARLIN_TILE[1])
            case _:
                assert_never(self.placement)

    @property
    def row_step(self) -> int:
        """The multiple of rows at which a matrix may be cut and quantized in parts: a shared scale is known before."""
        match self.placement:
            case Placement.ROW_MAJOR:
                return 1 if self.is_shared else self.block_size[0]
            case Placement.MARLIN:
                return MARLIN_TILE[0]
            case _:
                assert_never(self.placement)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix, or of a stack of matrices."""
        *stack, rows, columns = shape
        return (*stack, -(-rows // self.block_size[0]), -(-columns // self.block_size[1]))

    def block_at(self, start: Sequence[int]) -> tuple[int, ...] | None:
        """Return the block of a matrix, or of a stack, at whose first element a slice may begin; None if it may not, since the
        block's scale would be another.
        """
        *stack, row, column = start
        match self.amax_over:
            case AmaxOver.OWN_SLICE:
                is_cut = row % self.block_size[0] or column % self.block_size[1]
                return None if is_cut else (*stack, row // self.block_size[0], column // self.block_size[1])
            case AmaxOver.WHOLE_BLOCK:
                return (*stack, row // self.block_size[0], column // self.block_size[1])
            case _:
                assert_never(self.amax_over)

    def holds_whole_blocks(self, start: Sequence[int], shape: Sequence[int], full_shape: Sequence[int]) -> bool:
        """Whether who quantizes the whole matrix gets the bytes of a slice: it cuts no block, or the scale covers all of it."""
        ends = ((first + length, full) for first, length, full in zip(start, shape, full_shape, strict=True))
        cuts = (end % size and end != full for (end, full), size in zip(ends, self.block_size, strict=True))
        return self.amax_over.reaches_beyond or (self.block_at(start) is not None and not any(cuts))

    def columns_read(self, start: int, length: int, full: int) -> tuple[int, int]:
        """Return the columns of a matrix, first and number, whose values decide what a slice of its columns is quantized to."""
        match self.amax_over:
            case AmaxOver.OWN_SLICE:
                return start, length
            case AmaxOver.WHOLE_BLOCK:
                side = self.block_size[1]
                first = start // side * side
                return first, min(-(-(start + length) // side) * side, full) - first
            case _:
                assert_never(self.amax_over)

    @property
    def block(self) -> str:
        """Rows and columns that share a scale, for people."""
        return "x".join("all" if size == WHOLE else str(size) for size in self.block_size)

    def __str__(self) -> str:
        what = "row" if self.has_rows else "weight" if self.is_shared else f"{self.block} block"
        return f"{self.scale_format} scales per {what}{' and weight' if self.scale_format.has_two_levels else ''}"


PER_ROW = BlockFormat(block_size=(1, WHOLE), scale_format=ScaleFormat.FP32_DIVIDING, amax_over=AmaxOver.WHOLE_BLOCK)
"""FP8 per channel, as vLLM quantizes it: one scale per row, whichever part of the row a rank holds."""
MXFP8 = BlockFormat(block_size=(1, 32), scale_format=ScaleFormat.MX_CEIL)
"""MXFP8 as vLLM quantizes it since 0.28; the rule of its scales is another one in other versions."""
PER_TENSOR = BlockFormat(block_size=(WHOLE, WHOLE), amax_over=AmaxOver.WHOLE_BLOCK)
"""FP8 per tensor, as vLLM quantizes it: one scale per weight, whichever part of it a rank holds."""
NVFP4 = BlockFormat(
    block_size=(1, 16), scale_format=ScaleFormat.NV_E4M3, amax_over=AmaxOver.WHOLE_BLOCK, codes=Codes.E2M1
)
"""NVFP4 as ModelOpt quantizes it on a CPU."""


class Container(StrEnum):
    """What a checkpoint says of its format, and how it names and shapes scales of blocks. Their values are the same in each."""

    FP8 = "fp8"
    """DeepSeek's: `..._scale_inv`; `..._scale` for one scale per weight."""
    COMPRESSED_TENSORS = "compressed-tensors"
    """`..._scale`."""
    MODELOPT = "modelopt"
    """`..._scale`, of shape (rows, 1, columns, 1). NVFP4: `..._scale`, (rows, columns), and `..._scale_2` for the weight."""

    def holds(self, block_format: BlockFormat) -> bool:
        """Whether it has a form for a format whose activations are quantized as they come."""
        if block_format.scale_format.has_exponents:
            return False
        if block_format.scale_format.has_two_levels:
            return self is Container.MODELOPT
        match self:
            case Container.FP8:
                return not block_format.has_rows
            case Container.COMPRESSED_TENSORS:
                return True
            case Container.MODELOPT:
                return not (block_format.has_rows or block_format.is_shared)
            case _:
                assert_never(self)

    def or_other(self, block_format: BlockFormat) -> "Container":
        """This one, or another if it has no form for a format: an engine that quantizes itself boots from no container."""
        others = (self, *Container)
        return next((each for each in others if each.holds(block_format)), self)

    def scale_suffix(self, block_format: BlockFormat) -> str:
        """What follows the name of a weight in that of its scales."""
        match self:
            case Container.FP8:
                return "_scale" if block_format.is_shared else SCALE_SUFFIX
            case Container.COMPRESSED_TENSORS | Container.MODELOPT:
                return "_scale"
            case _:
                assert_never(self)

    @property
    def global_suffix(self) -> str:
        """What follows the name of a weight in that of its one scale beside those of blocks."""
        return "_scale_2"

    def shape_of(self, scale: Sequence[int], block_format: BlockFormat) -> tuple[int, ...]:
        """The shape in which scales of some rows and columns of blocks are stored."""
        if block_format.is_shared:
            return (1,)
        match self:
            case Container.FP8 | Container.COMPRESSED_TENSORS:
                return tuple(scale)
            case Container.MODELOPT:
                return tuple(scale if block_format.has_groups else (size for side in scale for size in (side, 1)))
            case _:
                assert_never(self)


def quantization_config(
    block_format: BlockFormat | None = None,
    kept: Iterable[str] = (),
    container: Container = Container.FP8,
    quantized: Iterable[str] = (),
) -> dict[str, object]:
    """Return what `config.json` says in checkpoints of a format, by default block FP8. Modules in `kept` are not quantized,
    those in `quantized` are.

    Raises:
        ValueError: The container has no such format.
    """
    block_format, names = block_format or BlockFormat(), list(dict.fromkeys(kept))
    match block_format.codes:
        case Codes.E4M3 | Codes.E2M1:
            pass  # follows from the scales
        case _:
            assert_never(block_format.codes)
    match block_format.scale_format:
        case (
            ScaleFormat.FP32
            | ScaleFormat.UE8M0
            | ScaleFormat.FP32_FLOORED
            | ScaleFormat.FP32_RECIPROCAL
            | ScaleFormat.FP32_DIVIDING
        ):
            return _config_of_fp8(block_format, names, container, tuple(quantized))
        case ScaleFormat.NV_E4M3:
            return {
                "quant_method": "modelopt",
                "quant_algo": "W4A16_NVFP4",
                "group_size": block_format.block_size[1],
                "ignore": _exactly(names, tuple(quantized)),
            }
        case ScaleFormat.MX_CEIL | ScaleFormat.MX_FLOOR | ScaleFormat.MX_UNIT:
            raise ValueError(f"checkpoints with {block_format} are not written; use one scale per row or block")
        case _:
            assert_never(block_format.scale_format)


def _config_of_fp8(
    block_format: BlockFormat, kept: list[str], container: Container, quantized: Sequence[str]
) -> dict[str, object]:
    """As vLLM's `Fp8Config`, `CompressedTensorsConfig` and `ModelOptFp8Config` read it."""
    block_size = block_format.block_size
    if not container.holds(block_format):
        raise ValueError(f"container {container} has no {block_format}; use {container.or_other(block_format)}")
    match container:
        case Container.FP8:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                **({} if block_format.is_shared else {"weight_block_size": list(block_size)}),
                "modules_to_not_convert": kept,
            }
        case Container.COMPRESSED_TENSORS:
            common = {"num_bits": 8, "type": "float", "symmetric": True}
            weights: dict[str, object] = {"strategy": "block", "block_structure": list(block_size)}
            activations: dict[str, object] = {"strategy": "group", "group_size": block_size[1]}
            if block_format.has_rows:
                weights, activations = {"strategy": "channel"}, {"strategy": "token"}
            elif block_format.is_shared:
                weights, activations = {"strategy": "tensor"}, {"strategy": "tensor"}
            group = {
                "targets": ["Linear"],
                "weights": {**common, **weights, "dynamic": False},
                "input_activations": {**common, **activations, "dynamic": True},
            }
            return {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "quantization_status": "compressed",
                "config_groups": {"group_0": group},
                "ignore": kept,
            }
        case Container.MODELOPT:
            return {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": _exactly(kept, quantized)}
        case _:
            assert_never(container)


def _exactly(names: list[str], quantized: Sequence[str]) -> list[str]:
    """These names, as ModelOpt's checkpoints have them. vLLM also leaves out what a name is a part of, as `mlp.gate` is of
    `mlp.gate_up_proj`: then a pattern, which is a part of none. It knows members of what it fuses by their plain names alone.
    """
    return [f"{each[:-1]}[{each[-1]}]" if any(each in other for other in quantized) else each for each in names]
