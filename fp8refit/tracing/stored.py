"""How an engine stores a block-FP8 weight, and which blocks the pieces of one cover."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8refit.live.formats import GLOBAL_SUFFIX, MARLIN_TILE, BlockFormat, Codes, Placement
from fp8refit.live.names import name_of_scale
from fp8refit.live.slots import FP8_DTYPE, SCALE_SUFFIX, SOURCE_DTYPES, dtype_name
from fp8refit.tracing.boxes import Boxes, Range
from fp8refit.tracing.records import Copy
from fp8refit.tracing.rules import KernelRules, Why

_SECOND = "_scale_2"
"""How ModelOpt calls the scales of whole weights, which vLLM keeps for experts."""
TWO_HALVES = "w13_weight"
"""Gate and up projections of an expert layer, one above the other."""


def is_experts(module: nn.Module) -> bool:
    """Whether `module` holds expert weights."""
    return TWO_HALVES in module._parameters


def own_name(module: nn.Module, key: str) -> str:
    """The name of a module's tensor; scales of blocks and rows get one name, whatever the container and the placement."""
    if key.endswith(_SECOND):
        return key.removesuffix(_SECOND) + GLOBAL_SUFFIX
    is_scaled = getattr(module, "weight_block_size", None) is not None or _is_scale_of_codes(module, key)
    return name_of_scale(key) if is_scaled else key


def _is_scale_of_codes(module: nn.Module, key: str) -> bool:
    """Whether a tensor holds scales of the E4M3 codes beside it: of blocks or rows, or one for each matrix."""
    scale, weight = module._parameters.get(key), _codes_of(module, key)
    if scale is None or weight is None or scale is weight:
        return False
    if _are_tiles(weight, scale) or _are_halves(weight, scale):
        return True
    is_scale = scale.ndim == weight.ndim or _is_of_matrices(scale, weight)
    return weight.dtype is FP8_DTYPE and scale.dtype in (torch.float32, torch.uint8) and is_scale


def _are_tiles(weight: Tensor, scale: Tensor | None) -> bool:
    """Whether a weight and its scales lie as Marlin's kernels read them. MXFP8: four codes in a word, (..., K / 16, 4 N);
    scales (..., K / 32, N). NVFP4: eight codes, (..., K / 16, 2 N); scales (..., K / 16, N).
    """
    if scale is None or weight.dtype is not torch.int32 or scale.ndim < 2:
        return False
    *stack, blocks, rows = scale.shape
    shapes = {torch.float8_e8m0fnu: [2 * blocks, 4 * rows], FP8_DTYPE: [blocks, 2 * rows]}
    return list(weight.shape) == [*stack, *shapes.get(scale.dtype, ())] and rows % MARLIN_TILE[0] == 0


def _are_halves(weight: Tensor, scale: Tensor | None) -> bool:
    """Whether a weight and its scales are NVFP4 in rows: two codes in a byte, (..., N, K / 2); scales (..., N, K / 16)."""
    if scale is None or weight.dtype is not torch.uint8 or scale.dtype is not FP8_DTYPE or scale.ndim < 2:
        return False
    return list(weight.shape) == [*scale.shape[:-1], 8 * scale.shape[-1]]


def _codes_of(module: nn.Module, key: str) -> Tensor | None:
    """The codes beside a scale."""
    return module._parameters.get(key.removesuffix("_scale"))


def _is_of_matrices(scale: Tensor, weight: Tensor) -> bool:
    """Whether scales are one for each matrix of a weight."""
    return scale.ndim < 2 <= weight.ndim and scale.numel() == prod(weight.shape[:-2])


def is_inside(module: nn.Module, key: str) -> bool:
    """Whether a tensor of a LoRA wrapper is that of the layer inside."""
    inside = getattr(getattr(module, "base_layer", None), key, None)
    return inside is not None and inside is getattr(module, key)


def own_tensors(module: nn.Module, kinds: Iterable[str] = ("_parameters", "_buffers")) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters, then its buffers; scales of blocks and rows under one name and as rows and columns, whatever
    the container, and codes as rows and columns, although a kernel may want their transpose; those in tiles as tiles.
    """
    for kind in kinds:
        for key, tensor in getattr(module, kind).items():
            if tensor is not None and not is_inside(module, key):
                name, values, codes = own_name(module, key), tensor.data, _codes_of(module, key)
                scale = module._parameters.get(f"{key}_scale")
                if scale is not None and _are_tiles(tensor, scale):
                    held = Codes.E2M1 if scale.dtype is FP8_DTYPE else Codes.E4M3
                    in_tile = prod(MARLIN_TILE) // held.per_element
                    values = values.view(held.dtype).view(*values.shape[:-1], -1, in_tile)
                elif codes is not None and codes is not tensor and _are_tiles(codes, tensor):
                    if values.dtype is torch.float8_e8m0fnu:
                        values = values.view(torch.uint8)
                    values = values.view(*values.shape[:-1], -1, MARLIN_TILE[0])
                elif name.endswith(SCALE_SUFFIX) and values.ndim == 4:
                    values = values[:, 0, :, 0]
                elif _is_transposed(module, key, values) or (codes is not None and _lie_in_one_row(values, codes)):
                    values = values.mT
                elif name.endswith(SCALE_SUFFIX) and codes is not None and _is_of_matrices(values, codes):
                    values = values.view(*codes.shape[:-2], 1, 1)
                yield name, values


def _is_transposed(module: nn.Module, key: str, values: Tensor) -> bool:
    """Whether codes with one scale per row or matrix are held as columns in the memory of rows, as their kernels want them."""
    scale = module._parameters.get(f"{key}_scale")
    if scale is None or values.dtype is not FP8_DTYPE or values.ndim != 2 or getattr(module, "weight_block_size", None):
        return False
    is_of_rows = tuple(scale.shape) == (values.shape[1], 1) or _lie_in_one_row(scale, values)
    return (is_of_rows or _is_of_matrices(scale, values)) and values.mT.is_contiguous()


def _lie_in_one_row(scale: Tensor, codes: Tensor) -> bool:
    """Whether scales of rows are one row themselves, beside codes that are held as columns."""
    are_columns = codes.dtype is FP8_DTYPE and codes.ndim == 2 and codes.mT.is_contiguous()
    return are_columns and scale.dtype is torch.float32 and tuple(scale.shape) == (1, codes.shape[1])


def why_not_stored(rules: KernelRules, prefix: str, module: nn.Module, own: Mapping[str, Tensor]) -> Why:
    """Say why the live tensors of a module cannot be written as they are stored."""
    if hasattr(module, "base_layer"):
        return f"holds {', '.join(f'`{name}`' for name in own)} around a layer, for LoRA", "Boot without enable_lora"
    if "w13_weight" in own and "base_layer" in prefix.split("."):
        return "is a layer of experts inside a LoRA wrapper, which was never tested", "Boot without enable_lora"
    for name, tensor in own.items():
        if tensor.numel() == 0:
            return f"its kernel removed `{name}`", "Boot with a kernel that keeps weights as loaded"
    scaled = [name for name in own if name + SCALE_SUFFIX in own]
    odd = [name for name, tensor in own.items() if not _is_known(name, tensor, scaled)]
    if odd:
        held = ", ".join(f"{name} ({dtype_name(own[name].dtype)})" for name in odd)
        method = type(getattr(module, "quant_method", None)).__name__
        return f"holds {held} under {method}, which is not block FP8", rules.other_quantization
    if not scaled:
        return None
    kernel = rules.kernel_of(module)
    if kernel.format is None:
        held = "experts" if TWO_HALVES in own else "weights"
        return f"its kernel {kernel.name} repacks {held}, or is not known to leave them as loaded", kernel.remedy
    for name in scaled:
        scale = module._parameters.get(f"{name}_scale")
        if scale is not None and scale.ndim < 2 and not kernel.format.is_shared:
            return f"holds `{name}` with one scale, which is not block FP8", rules.other_quantization
        if own[name].dtype is not kernel.format.codes.dtype or (
            kernel.format.scale_format.has_two_levels and name + GLOBAL_SUFFIX not in own
        ):
            return f"holds `{name}` in another way than its kernel {kernel.name} is known to read", kernel.remedy
        why = _why_not_placed(name, own[name], own[name + SCALE_SUFFIX], kernel.format)
        if why is not None:
            return why, kernel.remedy
    return None


def _is_known(name: str, tensor: Tensor, scaled: Sequence[str]) -> bool:
    """Whether a live tensor is part of a block-FP8 weight, or has a dtype that a source may have."""
    if name in scaled:
        return tensor.dtype in (FP8_DTYPE, torch.uint8)
    if name.endswith((SCALE_SUFFIX, GLOBAL_SUFFIX)):
        return name.removesuffix(SCALE_SUFFIX).removesuffix(GLOBAL_SUFFIX) in scaled
    return _is_plain(name, tensor)


def _is_plain(name: str, tensor: Tensor) -> bool:
    """Whether a live tensor is no part of a quantized weight."""
    stands_for_others = bool(is_traceable_wrapper_subclass(tensor))  # as torchao's do
    return tensor.dtype in SOURCE_DTYPES and not (stands_for_others or name.endswith(("weight_scale", SCALE_SUFFIX)))


def _why_not_placed(name: str, weight: Tensor, scale: Tensor, block_format: BlockFormat) -> str | None:
    """Say why a weight and its scales are not stored as their format says."""
    match block_format.placement:
        case Placement.ROW_MAJOR:
            return _why_not_row_major(name, weight, scale, block_format)
        case Placement.MARLIN:
            *stack, rows, columns = block_format.shape_of(weight.shape)
            expected = [*stack, columns // block_format.block_size[1], rows // MARLIN_TILE[0], MARLIN_TILE[0]]
            is_placed = weight.is_contiguous() and scale.is_contiguous() and list(scale.shape) == expected
            return None if is_placed else f"its `{name}` lies in other tiles than Marlin's"
        case _:
            assert_never(block_format.placement)


def _why_not_row_major(name: str, weight: Tensor, scale: Tensor, block_format: BlockFormat) -> str | None:
    if weight.ndim not in (2, 3) or not weight.is_contiguous():
        return f"its `{name}` is not a row-major {dtype_name(block_format.codes.dtype)} matrix"
    *experts, rows, columns = block_format.shape_of(weight.shape)
    is_cut = not block_format.is_shared and rows // 2 % block_format.block_size[0]
    halves = 2 if name == TWO_HALVES and is_cut else 1
    num_rows, num_columns = block_format.scale_shape((rows // halves, columns))
    expected = [*experts, halves * num_rows, num_columns]
    if scale.dtype is not block_format.scale_format.dtype or list(scale.shape) != expected or not scale.is_contiguous():
        found = f"{dtype_name(scale.dtype)} {list(scale.shape)}"
        return f"its `{name}{SCALE_SUFFIX}` is {found}, not row-major {dtype_name(block_format.scale_format.dtype)} {expected}"
    return None


def are_matrices(boxes: Boxes, ndim: int) -> bool:
    """Whether it is a box of a matrix, or of a stack of matrices, with rows as rows and columns as columns."""
    if len(boxes.dims) < 2:
        return False
    *stack, row, column = boxes.dims
    is_stack = stack in ([], [None]) or (ndim == 3 and stack == [0])
    if boxes.is_transposed:
        row, column = column, row
    return is_stack and row in (None, ndim - 2) and column in (None, ndim - 1)


def matrices(boxes: Boxes) -> Iterator[Boxes]:
    """Split a box of several experts' matrices into one box per expert."""
    place = boxes.dims[0]
    if len(boxes.read) < 3 or place is None:
        yield boxes
        return
    (first, _), (first_read, count) = boxes.into[place], boxes.read[0]
    for index in range(count):
        into, read = list(boxes.into), list(boxes.read)
        into[place], read[0] = (first + index, 1), (first_read + index, 1)
        yield Boxes(into=tuple(into), read=tuple(read), dims=(None, *boxes.dims[1:]))


def with_halves_swapped(pieces: Sequence[tuple[Copy, Boxes]], rows: int) -> list[tuple[Copy, Boxes]] | None:
    """Swap the upper and lower halves of a tensor's rows; None if a piece spans both in a way that cannot be split."""
    found, half = [], rows // 2
    for copy, boxes in pieces:
        start, count = boxes.into[1]
        if start < half < start + count and 1 not in boxes.dims:
            return None
        for first, last in ((start, min(start + count, half)), (max(start, half), start + count)):
            if first < last:
                into, read = list(boxes.into), list(boxes.read)
                into[1] = ((first + half) % rows, last - first)
                if 1 in boxes.dims:
                    place = boxes.dims.index(1)
                    read[place] = (read[place][0] + first - start, last - first)
                found.append((copy, replace(boxes, into=tuple(into), read=tuple(read))))
    return found


def block_rows(
    pieces: Sequence[Boxes], shape: Sequence[int], num_rows: int, block_format: BlockFormat
) -> dict[int, int] | None:
    """Map the first row of each piece to its first row of blocks; None if a piece does not start and end on block
    borders.

    The halves of `w13_weight` have separate blocks, whatever their number of rows.

    Args:
        pieces: Boxes of the weight.
        shape: That of the weight.
        num_rows: Rows of scales.
        block_format: Its format.
    """
    rows, columns = shape[-2:]
    block_n, block_k = block_format.block_size
    parts = {boxes.into[-2] for boxes in pieces}
    if block_format.is_shared:
        return dict.fromkeys((start for start, _ in parts), 0)
    if block_format.is_tiled and any(number % MARLIN_TILE[0] for part in parts for number in part):
        return None
    if not all(_is_on_grid(boxes.into[-1], block_k, columns) for boxes in pieces):
        return None
    if num_rows != -(-rows // block_n):
        is_half = all(start % (rows // 2) == 0 and size == rows // 2 for start, size in parts)
        return {start: start // (rows // 2) * (num_rows // 2) for start, _ in parts} if is_half else None
    return (
        {start: start // block_n for start, _ in parts} if all(_is_on_grid(p, block_n, rows) for p in parts) else None
    )


def _is_on_grid(part: Range, block: int, full: int) -> bool:
    start, size = part
    return start % block == 0 and (size % block == 0 or start + size == full)


def blocks_of(scale: Tensor, matrix: Boxes, starts: Mapping[int, int], block_format: BlockFormat) -> Tensor:
    """Return the scales of one matrix or a part of it: (block rows, block columns), or as they are placed."""
    *experts, (row, rows), (column, columns) = matrix.into
    num_rows, num_columns = block_format.scale_shape((rows, columns))
    blocks = (starts[row], num_rows), (column // block_format.block_size[1], num_columns)
    match block_format.placement:
        case Placement.ROW_MAJOR:
            return box_of(scale, (*experts, *blocks), (-2, -1))
        case Placement.MARLIN:
            return _in_tiles(scale, experts, *blocks)
        case _:
            assert_never(block_format.placement)


def global_of(global_scale: Tensor | None, matrix: Boxes) -> Tensor | None:
    """Return the scale of a whole weight: its own, or that of its expert."""
    if global_scale is None or not global_scale.ndim:
        return global_scale
    (expert, _), *_ = matrix.into
    return global_scale[expert]


def codes_of(weight: Tensor, boxes: Boxes, dims: Sequence[int | None], block_format: BlockFormat | None) -> Tensor:
    """Return a box of a live weight: rows and columns, or as codes are placed."""
    if block_format is None:
        return box_of(weight, boxes.into, dims)
    match block_format.placement:
        case Placement.ROW_MAJOR:
            *others, (column, columns) = boxes.into
            in_one = block_format.codes.per_element
            return box_of(weight, (*others, (column // in_one, columns // in_one)), dims)
        case Placement.MARLIN:
            *experts, rows, (column, columns) = boxes.into
            return _in_tiles(weight, experts, rows, (column // MARLIN_TILE[1], columns // MARLIN_TILE[1]))
        case _:
            assert_never(block_format.placement)


def _in_tiles(tensor: Tensor, experts: Sequence[Range], rows: Range, steps: Range) -> Tensor:
    """Return what a tensor (..., steps along rows, rows / 64, ...) has of one matrix: some rows, which are whole tiles, and
    steps.
    """
    for first, _ in experts:
        tensor = tensor[first]
    (row, num_rows), (step, num_steps), side = rows, steps, MARLIN_TILE[0]
    return tensor[step : step + num_steps, row // side : (row + num_rows) // side]


def box_of(tensor: Tensor, box: Sequence[Range], dims: Sequence[int | None]) -> Tensor:
    """Return a box of a tensor, made by one view operation instead of one for each dimension.

    Args:
        tensor: Any tensor.
        box: One range per dimension, within its size.
        dims: For each dimension of the result, the tensor's dimension; None for a new one of size 1.
    """
    sizes, strides, offset = _view_of(tuple(box), tensor.shape, tensor.stride(), tuple(dims))
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


@lru_cache(maxsize=4096)
def _view_of(
    box: tuple[Range, ...], shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int | None, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return sizes, strides and offset of a box. Cached, because layers are alike."""
    assert all(start + length <= size for (start, length), size in zip(box, shape, strict=True)), f"{box=} {shape=}"
    offset = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    sizes = tuple(1 if dim is None else box[dim][1] for dim in dims)
    return sizes, tuple(1 if dim is None else strides[dim] for dim in dims), offset
