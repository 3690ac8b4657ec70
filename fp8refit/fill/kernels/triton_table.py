"""The work table on a GPU: Triton kernels that walk a matrix of addresses.

A row of the matrix is one task (`_FIELDS`); a tile is what one program does, and a second array says which task each tile
belongs to. Rows of one kind of work lie together, so that each kind is one launch. A pointer that is read from memory
has no known alignment, and loads through it would be scalar: tasks whose addresses and rows are multiples of 16 bytes
form kinds of their own, for which the kernel is told so.
"""

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from fp8refit.fill.kernels.reference import AMAX_FLOOR
from fp8refit.fill.kernels.table import ALIGNMENT_BYTES, Task, WorkTable, assert_is_writable, is_empty
from fp8refit.live.layout_guard import Addresses, addresses_of
from fp8refit.live.slots import Op, ScaleFormat

_FIELDS = ("source", "target", "scale", "rows", "cols", "source_row", "source_col", "target_row", "scale_row",
           "first_tile", "tiles_per_row", "task")  # fmt: skip
_NUM_FIELDS = len(_FIELDS)
_SOURCE = _FIELDS.index("source")

_QUANTIZE_WARPS = 4
_BLOCKS_PER_PROGRAM = {2: 2}
"""By bytes of a source element; one of wider ones. The second block is on its way while the first is computed."""
_COPY_WARPS = 4
_COPY_TILE = 2048
_TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float8_e4m3fn: tl.uint8,
}


class Check(IntEnum):
    """What a copy flags."""

    FINITE = 0
    CODES = 1
    SCALES = 2
    POWERS_OF_TWO = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """What all rows of one launch have in common: the constants its kernel is compiled for."""

    op: Op
    source_dtype: torch.dtype
    target_dtype: torch.dtype
    scale_format: ScaleFormat
    block_size: tuple[int, int]
    round_to_bf16: bool
    is_aligned: bool


@dataclass(frozen=True, slots=True)
class _Launch:
    kind: Kind
    first_tile: int
    num_tiles: int


class TritonTable(WorkTable):
    """See `fp8refit.fill.kernels.table.WorkTable`."""

    def __init__(self, tasks: Sequence[Task], device: torch.device, places: Sequence[int] | None = None) -> None:
        rows = [row for index, task in enumerate(tasks) for row in _rows_of(index, task)]
        # Long launches first, so that the short ones are queued while they run.
        rows.sort(key=lambda row: (row[0].op is not Op.QUANTIZE, repr(row[0])))
        self._device = device
        self._launches, matrix, tile_rows = _lay_out(rows)
        self._byte_offsets = np.array([row[2] for row in rows], dtype=np.int64)
        pinned = device.type == "cuda"
        self._host_matrix = torch.empty(matrix.shape, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._host_view = self._host_matrix.numpy()
        self._host_view[:] = matrix
        task_of_row = matrix[:, _FIELDS.index("task")]
        self._source_of_row = task_of_row.copy() if places is None else np.array(places, dtype=np.int64)[task_of_row]
        self._misalignment = (matrix[:, _SOURCE] - self._byte_offsets) % ALIGNMENT_BYTES
        self._matrix = torch.empty(matrix.shape, dtype=torch.int64, device=device)
        self._tile_rows = torch.from_numpy(tile_rows).to(device)
        self._status = torch.zeros(max(len(tasks), 1), dtype=torch.int32, device=device)
        self._host_status = torch.zeros(self._status.shape, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._status_view = self._host_status.numpy()
        self._matrix.copy_(self._host_matrix, non_blocking=True)
        self._done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._graphs: dict[tuple[bool, bool], torch.cuda.CUDAGraph | None] = {}
        self.num_device_bytes = sum(
            tensor.numel() * tensor.element_size() for tensor in (self._matrix, self._tile_rows, self._status)
        )

    @torch.inference_mode()
    @override
    def refresh(self, sources: Sequence[Tensor], addresses: Addresses | None = None) -> bool:
        self.bad_tasks()
        if addresses is None:
            addresses = addresses_of(sources)
        if not np.array_equal(addresses[self._source_of_row] % ALIGNMENT_BYTES, self._misalignment):
            return False
        self._host_view[:, _SOURCE] = addresses[self._source_of_row] + self._byte_offsets
        self._matrix.copy_(self._host_matrix, non_blocking=True)
        return True

    @torch.inference_mode()
    @override
    def launch(self, *, check: bool, write: bool = True, begun: torch.cuda.Event | None = None) -> None:
        # Triton launches on the current device.
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            if self._done is None:
                self._launch_all(check=check, write=write)
                return
            self._launch_or_replay(check=check, write=write, begun=begun)
            self._done.record(torch.cuda.current_stream(self._device))

    def _launch_or_replay(self, *, check: bool, write: bool, begun: torch.cuda.Event | None) -> None:
        """Launch the kernels the first time, which compiles them; later replay the launches as one CUDA graph.

        A Triton launch costs the host about 0.1 ms, during which the device would be idle.
        """
        key = check, write
        is_first, graph = key not in self._graphs, self._graphs.get(key)
        if graph is None:
            self._graphs[key] = graph = None if is_first else self._capture(check=check, write=write)
        if begun is not None:
            begun.record(torch.cuda.current_stream(self._device))
        if graph is None:
            self._launch_all(check=check, write=write)
        else:
            graph.replay()

    def _capture(self, *, check: bool, write: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(self._device, threading.get_ident())
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Not `torch.cuda.graph`, which first frees all cached memory. Other threads are not restricted.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._launch_all(check=check, write=write)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error matters
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def _launch_all(self, *, check: bool, write: bool) -> None:
        for launch in self._launches:
            checks = check or launch.kind.op is Op.COPY_SCALES
            _run(launch, self._matrix, self._tile_rows, self._status, check=checks, write=write)
        self._host_status.copy_(self._status, non_blocking=True)

    @override
    def bad_tasks(self) -> list[int]:
        if self._done is not None:
            self._done.synchronize()
        bad: list[int] = self._status_view.nonzero()[0].tolist()
        if bad:
            with torch.inference_mode():
                self._status.zero_()
        return bad

    @override
    def release(self) -> None:
        """A table holds addresses only."""


@lru_cache(maxsize=16)
def _capture_stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """The stream that a thread captures on, always the same one.

    A capture also records what others launch on its stream. torch hands out 32 streams in turn, so a new one for each
    capture would soon be one that the trainer or the engine uses.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _rows_of(index: int, task: Task) -> list[tuple[Kind, dict[str, int], int]]:
    """The table rows of one task: kind, fields, and the byte offset of the row's box in the source tensor."""
    assert_is_writable(task)
    if is_empty(task):
        return []
    box = task.box(task.source.detach())
    if task.op is Op.QUANTIZE:
        assert task.scale is not None and box.ndim == 2, f"{task=}"
        pieces = [(box, task.target)]
    else:
        pieces = _as_matrices(box, task.target)
    rows = []
    for source, target in pieces:
        fields = {
            "source": source.data_ptr(),
            "target": target.data_ptr(),
            "scale": task.scale.data_ptr() if task.scale is not None else 0,
            "rows": source.shape[0],
            "cols": source.shape[1],
            "source_row": source.stride(0),
            "source_col": source.stride(1),
            "target_row": target.stride(0),
            "scale_row": task.scale.stride(0) if task.scale is not None else 0,
            "task": index,
        }
        is_quantize = task.op is Op.QUANTIZE
        kind = Kind(
            op=task.op,
            source_dtype=source.dtype,
            target_dtype=target.dtype,
            scale_format=task.scale_format if task.op in (Op.QUANTIZE, Op.COPY_SCALES) else ScaleFormat.FP32,
            block_size=task.block_size if is_quantize else (1, _COPY_TILE),
            round_to_bf16=is_quantize and source.dtype is torch.float32 and task.round_to_bf16,
            is_aligned=_is_aligned(source) and _is_aligned(target),
        )
        rows.append((kind, fields, source.data_ptr() - task.source.data_ptr()))
    return rows


def _as_matrices(source: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs of 2-D views that together cover two tensors of one shape, as few and as wide as their strides allow."""
    if source.is_contiguous() and target.is_contiguous():
        return [(source.reshape(1, -1), target.view(1, -1))]
    if source.ndim == 1:
        return [(source[None], target[None])]
    if source.ndim == 2:
        return [(source, target)]
    return [pair for part, place in zip(source, target, strict=True) for pair in _as_matrices(part, place)]


def _is_aligned(matrix: Tensor) -> bool:
    """Whether rows are dense and every row starts and ends on a multiple of 16 bytes and of 16 elements."""
    rows, cols = matrix.shape
    return (
        (matrix.stride(1) == 1 or cols == 1)
        and matrix.data_ptr() % ALIGNMENT_BYTES == 0
        and cols % 16 == 0
        and (rows == 1 or matrix.stride(0) % 16 == 0)
    )


def _lay_out(rows: list[tuple[Kind, dict[str, int], int]]) -> tuple[list[_Launch], np.ndarray, np.ndarray]:
    """Number the tiles of every row and group the rows of one kind into launches."""
    matrix = np.zeros((len(rows), _NUM_FIELDS), dtype=np.int64)
    launches: list[_Launch] = []
    tile_rows: list[np.ndarray] = []
    next_tile = 0
    for index, (kind, fields, _) in enumerate(rows):
        block_n, block_k = kind.block_size
        tiles_per_row = -(-fields["cols"] // block_k)
        num_tiles = -(-fields["rows"] // block_n) * tiles_per_row
        fields |= {"first_tile": next_tile, "tiles_per_row": tiles_per_row}
        matrix[index] = [fields[name] for name in _FIELDS]
        tile_rows.append(np.full(num_tiles, index, dtype=np.int32))
        if launches and launches[-1].kind == kind:
            last = launches.pop()
            launches.append(_Launch(kind, last.first_tile, last.num_tiles + num_tiles))
        else:
            launches.append(_Launch(kind, next_tile, num_tiles))
        next_tile += num_tiles
    return launches, matrix, np.concatenate(tile_rows) if tile_rows else np.zeros(0, dtype=np.int32)


def _run(launch: _Launch, matrix: Tensor, tile_rows: Tensor, status: Tensor, *, check: bool, write: bool) -> None:
    kind = launch.kind
    common = {
        "first_tile": launch.first_tile,
        "SOURCE": _TRITON_DTYPES[kind.source_dtype],
        "TARGET": _TRITON_DTYPES[kind.target_dtype],
        "NUM_FIELDS": _NUM_FIELDS,
        "IS_ALIGNED": kind.is_aligned,
        "CHECK": check,
        "WRITE": write,
    }
    if kind.op is Op.QUANTIZE:
        block_n, block_k = kind.block_size
        tile_n, tile_k = triton.next_power_of_2(block_n), triton.next_power_of_2(block_k)
        num_blocks = _BLOCKS_PER_PROGRAM.get(kind.source_dtype.itemsize, 1)
        _quantize_tiles[(-(-launch.num_tiles // num_blocks),)](
            matrix,
            tile_rows,
            status,
            num_tiles=launch.num_tiles,
            NUM_BLOCKS=num_blocks,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            TILE_N=tile_n,
            TILE_K=tile_k,
            IS_UE8M0=kind.scale_format is ScaleFormat.UE8M0,
            AMAX_FLOOR=AMAX_FLOOR[kind.scale_format],
            ROUND_TO_BF16=kind.round_to_bf16,
            SATURATES=isinstance(_quantize_tiles, triton.JITFunction),
            num_warps=_QUANTIZE_WARPS,
            **common,
        )
        return
    rule = {Op.COPY: Check.FINITE, Op.COPY_CODES: Check.CODES}.get(kind.op)
    if rule is None:
        rule = Check.POWERS_OF_TWO if kind.scale_format is ScaleFormat.UE8M0 else Check.SCALES
    _copy_tiles[(launch.num_tiles,)](
        matrix, tile_rows, status, TILE=_COPY_TILE, RULE=int(rule), num_warps=_COPY_WARPS, **common
    )


@triton.jit
def _magnitude_bits(x):
    """float32 bits of |x|, which sort like the magnitudes, with Inf and NaN above every finite value."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _amax_bits(x):
    """`_magnitude_bits` of the largest magnitude of a block. 16-bit values are compared as they came: half the registers."""
    if x.dtype.primitive_bitwidth == 16:
        largest = tl.max(tl.max(x.to(tl.int16, bitcast=True) & 0x7FFF, axis=1), axis=0).to(tl.int16)
        return _magnitude_bits(largest.to(x.dtype, bitcast=True))
    return tl.max(tl.max(_magnitude_bits(x), axis=1), axis=0)


@triton.jit
def _load_row(matrix, tile_rows, tile, NUM_FIELDS: tl.constexpr):
    """Where the row of this tile starts in the matrix."""
    return matrix + tl.load(tile_rows + tile).to(tl.int64) * NUM_FIELDS


@triton.jit(do_not_specialize=["first_tile", "num_tiles"])
def _quantize_tiles(
    matrix, tile_rows, status, first_tile, num_tiles, NUM_BLOCKS: tl.constexpr,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, NUM_FIELDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    IS_UE8M0: tl.constexpr, AMAX_FLOOR: tl.constexpr, ROUND_TO_BF16: tl.constexpr, SATURATES: tl.constexpr,
    IS_ALIGNED: tl.constexpr, CHECK: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """One program quantizes `NUM_BLOCKS` blocks."""
    first = tl.program_id(0) * NUM_BLOCKS
    for index in tl.static_range(NUM_BLOCKS):
        if first + index < num_tiles:
            _quantize_tile(
                matrix, tile_rows, status, first_tile + first + index, SOURCE, TARGET, NUM_FIELDS, BLOCK_N, BLOCK_K,
                TILE_N, TILE_K, IS_UE8M0, AMAX_FLOOR, ROUND_TO_BF16, SATURATES, IS_ALIGNED, CHECK, WRITE,
            )  # fmt: skip


@triton.jit
def _quantize_tile(
    matrix, tile_rows, status, tile,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, NUM_FIELDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    IS_UE8M0: tl.constexpr, AMAX_FLOOR: tl.constexpr, ROUND_TO_BF16: tl.constexpr, SATURATES: tl.constexpr,
    IS_ALIGNED: tl.constexpr, CHECK: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Quantize one block; the arithmetic is `reference.quantize_reference`, bit for bit."""
    row = _load_row(matrix, tile_rows, tile, NUM_FIELDS)
    source = tl.load(row + 0).to(tl.pointer_type(SOURCE))
    target = tl.load(row + 1).to(tl.pointer_type(tl.float8e4nv))
    scale = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    num_rows = tl.load(row + 3).to(tl.int32)
    num_cols = tl.load(row + 4).to(tl.int32)
    source_row = tl.load(row + 5)
    source_col = tl.load(row + 6)
    target_row = tl.load(row + 7)
    scale_row = tl.load(row + 8)
    local = (tile - tl.load(row + 9)).to(tl.int32)
    tiles_per_row = tl.load(row + 10).to(tl.int32)
    block_n, block_k = local // tiles_per_row, local % tiles_per_row
    if IS_ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        num_cols = tl.multiple_of(num_cols, 16)
        source_row = tl.multiple_of(source_row, 16)
        target_row = tl.multiple_of(target_row, 16)
        source_col = 1

    n = tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    first_n, first_k = block_n * BLOCK_N, block_k * BLOCK_K
    mask = (first_n + n < num_rows)[:, None] & (first_k + k < num_cols)[None, :]
    if TILE_N != BLOCK_N:
        mask = mask & (n < BLOCK_N)[:, None]
    if TILE_K != BLOCK_K:
        mask = mask & (k < BLOCK_K)[None, :]
    source_at = source + first_n.to(tl.int64) * source_row + first_k.to(tl.int64) * source_col
    x = tl.load(source_at + n[:, None] * source_row + k[None, :] * source_col, mask=mask, other=0.0)
    if ROUND_TO_BF16:
        x = x.to(tl.bfloat16)
    amax_bits = _amax_bits(x)
    x = x.to(tl.float32)
    if CHECK:
        tl.store(status + tl.load(row + 11), 1, mask=amax_bits >= 0x7F800000)
    if WRITE:
        amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), AMAX_FLOOR)
        if IS_UE8M0:
            bits = amax.to(tl.int32, bitcast=True)
            exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x680000).to(tl.int32)
            s = (exponent << 23).to(tl.float32, bitcast=True)
        else:
            s = tl.div_rn(amax, 448.0)
        inverse = tl.div_rn(1.0, s)
        code = x * inverse
        if not SATURATES:  # a GPU's cast does: cvt.rn.satfinite.e4m3x2
            code = tl.minimum(tl.maximum(code, -448.0), 448.0)
        code = code.to(tl.float8e4nv)
        target_at = target + first_n.to(tl.int64) * target_row + first_k
        tl.store(target_at + n[:, None] * target_row + k[None, :], code, mask=mask)
        tl.store(scale + block_n * scale_row + block_k, s)


@triton.jit(do_not_specialize=["first_tile"])
def _copy_tiles(
    matrix, tile_rows, status, first_tile,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, NUM_FIELDS: tl.constexpr,
    TILE: tl.constexpr, RULE: tl.constexpr,
    IS_ALIGNED: tl.constexpr, CHECK: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """One program copies one segment of one row. `RULE` is a `Check`: what to flag."""
    tile = first_tile + tl.program_id(0)
    row = _load_row(matrix, tile_rows, tile, NUM_FIELDS)
    source = tl.load(row + 0).to(tl.pointer_type(SOURCE))
    target = tl.load(row + 1).to(tl.pointer_type(TARGET))
    num_cols = tl.load(row + 4)
    source_row = tl.load(row + 5)
    source_col = tl.load(row + 6)
    target_row = tl.load(row + 7)
    local = (tile - tl.load(row + 9)).to(tl.int32)
    tiles_per_row = tl.load(row + 10).to(tl.int32)
    if IS_ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        num_cols = tl.multiple_of(num_cols, 16)
        source_row = tl.multiple_of(source_row, 16)
        target_row = tl.multiple_of(target_row, 16)
        source_col = 1

    n = (local // tiles_per_row).to(tl.int64)
    first_k = (local % tiles_per_row).to(tl.int64) * TILE
    k = tl.arange(0, TILE)
    mask = k < num_cols - first_k
    x = tl.load(source + n * source_row + first_k * source_col + k * source_col, mask=mask, other=0)
    value = x if SOURCE == TARGET else x.to(tl.float32).to(TARGET)
    if WRITE:
        tl.store(target + n * target_row + first_k + k, value, mask=mask)
    if CHECK:
        if RULE == 0:
            is_bad = _magnitude_bits(value) >= 0x7F800000
        elif RULE == 1:
            is_bad = (value & 0x7F) == 0x7F
        else:
            bits = value.to(tl.int32, bitcast=True)
            is_bad = (bits <= 0) | (bits >= 0x7F800000)
            if RULE == 3:
                is_bad = is_bad | ((bits & 0x7FFFFF) != 0)
        num_bad = tl.sum((is_bad & mask).to(tl.int32), axis=0)
        tl.store(status + tl.load(row + 11), 1, mask=num_bad > 0)
