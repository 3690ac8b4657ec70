"""The work table on a GPU: Triton kernels that walk a matrix of addresses.

A row of the matrix is one task (`_FIELDS`), and rows lie in the order of their sources. A tile is what one program does, and
a second array says which row each tile belongs to. Tiles of one kind of work lie together, in the order of their rows, so
that each kind is one launch, for all sources or for some that follow each other. A pointer that is read from memory has no
known alignment, and loads through it would be scalar: tasks whose addresses and rows are multiples of 16 bytes form kinds
of their own, for which the kernel is told so.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from fp8refit.fill.kernels.reference import AMAX_FLOOR
from fp8refit.fill.kernels.table import ALIGNMENT_BYTES, Action, Task, WorkTable, assert_is_writable, is_empty
from fp8refit.live.layout_guard import Addresses, addresses_of
from fp8refit.live.slots import Op, ScaleFormat

_FIELDS = ("source", "target", "scale", "rows", "cols", "source_row", "source_col", "target_row", "scale_row",
           "first_tile", "tiles_per_row", "task")  # fmt: skip
_NUM_FIELDS = len(_FIELDS)
_SOURCE, _ROWS, _FIRST_TILE, _TILES_PER_ROW, _TASK = map(
    _FIELDS.index, ("source", "rows", "first_tile", "tiles_per_row", "task")
)

_QUANTIZE_WARPS = 4
_BLOCKS_PER_PROGRAM = {2: 2}
"""By bytes of a source element; one of wider ones. The second block is on its way while the first is computed."""
_COPY_WARPS = 4
_COPY_TILE = 2048
_FLAGS_ALIGNMENT = 4
"""Kernels are compiled for pointers that are multiples of 16 bytes."""
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


@dataclass(kw_only=True, slots=True)
class _Rows:
    """Rows of a matrix, before their tiles are numbered."""

    kinds: list[Kind]
    fields: np.ndarray
    """(rows, fields) int64."""
    byte_offsets: np.ndarray
    """Where the box of each row starts in its source."""
    places: np.ndarray
    """The place of each row's source, ascending."""
    alignment: np.ndarray
    """The address of each row's source, modulo the alignment of loads."""
    num_tasks: int
    num_places: int


class TritonTable(WorkTable):
    """See `fp8refit.fill.kernels.table.WorkTable`."""

    def __init__(
        self,
        tasks: Sequence[Task],
        device: torch.device,
        places: Sequence[int] | None = None,
        *,
        num_places: int | None = None,
    ) -> None:
        self._lay_out(_rows_of_all(tasks, range(len(tasks)) if places is None else places, num_places), device)

    @classmethod
    def joined(cls, tables: Sequence[WorkTable]) -> "TritonTable":
        """See `fp8refit.fill.kernels.table.join_tables`."""
        parts = [table for table in tables if isinstance(table, TritonTable)]
        whole = cls.__new__(cls)
        whole._lay_out(_joined([part._rows for part in parts]), parts[0]._device)
        return whole

    def _lay_out(self, rows: _Rows, device: torch.device) -> None:
        """Number the tiles of every row, kind by kind, and allocate."""
        self._rows, self._device = rows, device
        tile_rows = _number_tiles(rows)
        # Long launches first, so that the short ones are queued while they run.
        self._tiles = [(kind, _first_tiles(rows, kind)) for kind in _in_order(set(rows.kinds))]
        """For each kind, the first tile of each row, if all rows before it were there; and the end."""
        self._first_rows: list[int] = np.searchsorted(rows.places, np.arange(rows.num_places + 1)).tolist()
        self._pointed_at = _addresses(rows)
        """The source address that the rows of each place have."""
        with torch.inference_mode(False):  # tensors that can be written in any mode
            self._allocate(rows, tile_rows)
        self._done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._has_run = False
        """Whether `run` was called and its flags are not on their way to the host."""
        self._graphs: dict[tuple[bool, Action], torch.cuda.CUDAGraph | None] = {}
        self._launchers: dict[tuple[int, bool, Action], _Launcher] = {}
        """By index of the kind."""
        self.num_device_bytes = sum(
            tensor.numel() * tensor.element_size() for tensor in (self._matrix, self._tile_rows, self._status)
        )

    def _allocate(self, rows: _Rows, tile_rows: np.ndarray) -> None:
        device, pinned = self._device, self._device.type == "cuda"
        self._host_matrix = torch.empty(rows.fields.shape, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._host_view = self._host_matrix.numpy()
        self._host_view[:] = rows.fields
        self._matrix = torch.empty(rows.fields.shape, dtype=torch.int64, device=device)
        self._tile_rows = torch.from_numpy(tile_rows).to(device)
        num_flags = -(-max(rows.num_tasks, 1) // _FLAGS_ALIGNMENT) * _FLAGS_ALIGNMENT
        self._status = torch.zeros((2, num_flags), dtype=torch.int32, device=device)
        """For each task whether its values are bad, and whether they differ from its target."""
        self._host_status = torch.zeros(self._status.shape, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._status_view = self._host_status.numpy()
        self._matrix.copy_(self._host_matrix, non_blocking=True)
        self._arrays = self._matrix, self._tile_rows, self._status[0], self._status[1]

    @override
    def refresh(self, sources: Sequence[Tensor], addresses: Addresses | None = None) -> bool:
        self._settle()
        self._clear_flags()
        return self._point(0, addresses if addresses is not None else addresses_of(sources))

    @override
    def launch(self, *, check: bool, action: Action = Action.WRITE, begun: torch.cuda.Event | None = None) -> None:
        with self._on_device():
            if self._done is None:
                self._launch_all(check=check, action=action)
                return
            self._launch_or_replay(check=check, action=action, begun=begun)
            self._done.record(torch.cuda.current_stream(self._device))

    @override
    def run(
        self,
        first: int,
        sources: Sequence[Tensor],
        addresses: Addresses | None = None,
        *,
        check: bool,
        action: Action = Action.WRITE,
    ) -> bool:
        shift = 0
        if self._first_rows[first] == self._first_rows[first + len(sources)]:
            return True
        if len(sources) == 1:
            shift = sources[0].data_ptr() - int(self._pointed_at[first])
            if shift % ALIGNMENT_BYTES:
                return False
        elif not self._point(first, addresses if addresses is not None else addresses_of(sources)):
            return False
        with self._on_device():
            self._launch_rows(first, first + len(sources), shift, check=check, action=action)
        self._has_run = True
        return True

    def _on_device(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device."""
        device = self._device
        if device.type != "cuda" or torch.cuda.current_device() == device.index:
            return nullcontext()
        return torch.cuda.device(device)

    def _point(self, first: int, addresses: Addresses) -> bool:
        """Point the rows of the places from `first` on at other addresses, unless these are aligned otherwise."""
        rows = self._rows
        start, end = self._first_rows[first], self._first_rows[first + len(addresses)]
        by_row = addresses[rows.places[start:end] - first]
        if not np.array_equal(by_row % ALIGNMENT_BYTES, rows.alignment[start:end]):
            return False
        self._host_view[start:end, _SOURCE] = by_row + rows.byte_offsets[start:end]
        self._matrix[start:end].copy_(self._host_matrix[start:end], non_blocking=True)
        self._pointed_at[first : first + len(addresses)] = addresses
        return True

    def _launch_or_replay(self, *, check: bool, action: Action, begun: torch.cuda.Event | None) -> None:
        """Launch the kernels the first time, which compiles them; later replay the launches as one CUDA graph.

        The device would be idle while the host launches one kind after the other.
        """
        key = check, action
        is_first, graph = key not in self._graphs, self._graphs.get(key)
        if graph is None:
            self._graphs[key] = graph = None if is_first else self._capture(check=check, action=action)
        if begun is not None:
            begun.record(torch.cuda.current_stream(self._device))
        if graph is None:
            self._launch_all(check=check, action=action)
        else:
            graph.replay()

    def _capture(self, *, check: bool, action: Action) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(self._device, threading.get_ident())
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Not `torch.cuda.graph`, which first frees all cached memory. Other threads are not restricted.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._launch_all(check=check, action=action)
            except BaseException:
                with suppress(RuntimeError):  # the first error matters
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def _launch_all(self, *, check: bool, action: Action) -> None:
        self._launch_rows(0, self._rows.num_places, 0, check=check, action=action)
        self._host_status.copy_(self._status, non_blocking=True)

    def _launch_rows(self, first: int, last: int, shift: int, *, check: bool, action: Action) -> None:
        """Launch the tiles of the places from `first` to before `last`, with `shift` bytes added to their sources."""
        start, end = self._first_rows[first], self._first_rows[last]
        for index, (kind, first_tiles) in enumerate(self._tiles):
            if count := first_tiles[end] - first_tiles[start]:
                key = index, check, action
                launcher = self._launchers.get(key)
                if launcher is None:
                    checks = check or kind.op is Op.COPY_SCALES
                    launcher = self._launchers[key] = _launcher_of(kind, self._device, check=checks, action=action)
                launcher.launch(self._arrays, shift, first_tiles[start], count)

    @override
    def bad_tasks(self) -> list[int]:
        self._settle()
        return self._take_flags(0)

    @override
    def differing_tasks(self) -> list[int]:
        self._settle()
        return self._take_flags(1)

    def _settle(self) -> None:
        """Wait for everything that was launched, with the flags on the host."""
        if self._has_run:
            self._host_status.copy_(self._status, non_blocking=True)
            if self._done is not None:
                self._done.record(torch.cuda.current_stream(self._device))
            self._has_run = False
        if self._done is not None:
            self._done.synchronize()

    def _take_flags(self, which: int) -> list[int]:
        flagged: list[int] = self._status_view[which].nonzero()[0].tolist()
        if flagged:
            self._status[which].zero_()
            self._status_view[which] = 0
        return flagged

    def _clear_flags(self) -> None:
        for which in range(2):
            self._take_flags(which)

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


def _rows_of_all(tasks: Sequence[Task], places: Sequence[int], num_places: int | None) -> _Rows:
    """The rows of all tasks, in the order of their places."""
    found = sorted(
        (
            (place, row)
            for index, (task, place) in enumerate(zip(tasks, places, strict=True))
            for row in _rows_of(index, task)
        ),
        key=lambda each: each[0],
    )
    fields = np.zeros((len(found), _NUM_FIELDS), dtype=np.int64)
    for number, (_, (_, values, _)) in enumerate(found):
        fields[number] = [values.get(name, 0) for name in _FIELDS]
    byte_offsets = np.array([offset for _, (_, _, offset) in found], dtype=np.int64)
    return _Rows(
        kinds=[kind for _, (kind, _, _) in found],
        fields=fields,
        byte_offsets=byte_offsets,
        places=np.array([place for place, _ in found], dtype=np.int64),
        alignment=(fields[:, _SOURCE] - byte_offsets) % ALIGNMENT_BYTES,
        num_tasks=len(tasks),
        num_places=max(places, default=-1) + 1 if num_places is None else num_places,
    )


def _joined(parts: Sequence[_Rows]) -> _Rows:
    """The rows of several tables, with their tasks and places one after another."""
    first_tasks = np.cumsum([0, *(part.num_tasks for part in parts)])
    first_places = np.cumsum([0, *(part.num_places for part in parts)])
    fields = [part.fields.copy() for part in parts]
    for own, first_task in zip(fields, first_tasks, strict=False):
        own[:, _TASK] += first_task
    places = [part.places + first for part, first in zip(parts, first_places, strict=False)]
    return _Rows(
        kinds=[kind for part in parts for kind in part.kinds],
        fields=np.concatenate(fields),
        byte_offsets=np.concatenate([part.byte_offsets for part in parts]),
        places=np.concatenate(places),
        alignment=np.concatenate([part.alignment for part in parts]),
        num_tasks=int(first_tasks[-1]),
        num_places=int(first_places[-1]),
    )


def _addresses(rows: _Rows) -> np.ndarray:
    """The source address of each place, (places,) int64; 0 if it has no rows."""
    addresses = np.zeros(rows.num_places, dtype=np.int64)
    addresses[rows.places] = rows.fields[:, _SOURCE] - rows.byte_offsets
    return addresses


def _in_order(kinds: Iterable[Kind]) -> list[Kind]:
    """Kinds in the order of their launches: quantization first."""
    return sorted(kinds, key=lambda kind: (kind.op is not Op.QUANTIZE, repr(kind)))


def _number_tiles(rows: _Rows) -> np.ndarray:
    """Set the first tile of every row, and return the row of every tile, (tiles,) int32."""
    tile_rows, next_tile = [], 0
    by_kind: dict[Kind, list[int]] = {}
    for number, kind in enumerate(rows.kinds):
        by_kind.setdefault(kind, []).append(number)
    for kind in _in_order(by_kind):
        numbers = np.array(by_kind[kind])
        counts = rows.fields[numbers, _TILES_PER_ROW] * -(-rows.fields[numbers, _ROWS] // kind.block_size[0])
        ends = next_tile + np.cumsum(counts)
        rows.fields[numbers, _FIRST_TILE] = ends - counts
        tile_rows.append(np.repeat(numbers, counts))
        next_tile = int(ends[-1])
    return np.concatenate(tile_rows).astype(np.int32) if tile_rows else np.zeros(0, dtype=np.int32)


def _first_tiles(rows: _Rows, kind: Kind) -> list[int]:
    """For each row and the end: the first tile of this kind that belongs to it or to a later row."""
    is_it = np.array([each == kind for each in rows.kinds])
    counts = np.where(is_it, rows.fields[:, _TILES_PER_ROW] * -(-rows.fields[:, _ROWS] // kind.block_size[0]), 0)
    first = int(rows.fields[is_it, _FIRST_TILE].min())
    firsts: list[int] = (first + np.concatenate([[0], np.cumsum(counts)])).tolist()
    return firsts


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
            "tiles_per_row": -(-source.shape[1] // kind.block_size[1]),
            "task": index,
        }
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


class _Launcher:
    """Launches one kind of work. Once Triton has compiled the kernel, it is launched without asking Triton which it is,
    which takes the host a tenth of the time.
    """

    def __init__(self, kind: Kind, *, check: bool, action: Action) -> None:
        self._tiles_per_program, self._kernel, self._constants, self._options = _describe(
            kind, check=check, action=action
        )

    def launch(self, arrays: tuple[Tensor, ...], shift: int, first_tile: int, num_tiles: int) -> None:
        """Launch some tiles on the current stream of the current device, which is the arrays'."""
        grid = -(-num_tiles // self._tiles_per_program), 1, 1
        compiled = self._kernel[grid](*arrays, shift, first_tile, num_tiles, *self._constants, **self._options)
        if compiled is not None:
            self._kernel, self._options = compiled, {}


@cache
def _launcher_of(kind: Kind, device: torch.device, *, check: bool, action: Action) -> _Launcher:
    """One for each device, since a compiled kernel is loaded there."""
    return _Launcher(kind, check=check, action=action)


def _describe(kind: Kind, *, check: bool, action: Action) -> tuple[int, Any, tuple[Any, ...], dict[str, int]]:
    """Tiles of one program, the kernel, its constants in the order of its parameters, and how to launch it."""
    common = {
        "SOURCE": _TRITON_DTYPES[kind.source_dtype],
        "TARGET": _TRITON_DTYPES[kind.target_dtype],
        "NUM_FIELDS": _NUM_FIELDS,
        "IS_ALIGNED": kind.is_aligned,
        "CHECK": check,
        "WRITE": action is Action.WRITE,
        "COMPARE": action is Action.COMPARE,
    }
    if kind.op is Op.QUANTIZE:
        block_n, block_k = kind.block_size
        num_blocks = _BLOCKS_PER_PROGRAM.get(kind.source_dtype.itemsize, 1)
        constants = common | {
            "NUM_BLOCKS": num_blocks,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "TILE_N": triton.next_power_of_2(block_n),
            "TILE_K": triton.next_power_of_2(block_k),
            "IS_UE8M0": kind.scale_format is ScaleFormat.UE8M0,
            "AMAX_FLOOR": AMAX_FLOOR[kind.scale_format],
            "ROUND_TO_BF16": kind.round_to_bf16,
            "SATURATES": isinstance(_quantize_tiles, triton.JITFunction),
        }
        return num_blocks, _quantize_tiles, _in_signature(_quantize_tiles, constants), {"num_warps": _QUANTIZE_WARPS}
    rule = {Op.COPY: Check.FINITE, Op.COPY_CODES: Check.CODES}.get(kind.op)
    if rule is None:
        rule = Check.POWERS_OF_TWO if kind.scale_format is ScaleFormat.UE8M0 else Check.SCALES
    constants = common | {"TILE": _COPY_TILE, "RULE": int(rule)}
    return 1, _copy_tiles, _in_signature(_copy_tiles, constants), {"num_warps": _COPY_WARPS}


def _in_signature(kernel: Any, constants: Mapping[str, Any]) -> tuple[Any, ...]:
    """Constants in the order of a kernel's parameters, the first seven of which are no constants."""
    return tuple(constants[name] for name in kernel.arg_names[7:])


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


@triton.jit(do_not_specialize=["shift", "first_tile", "num_tiles"])
def _quantize_tiles(
    matrix, tile_rows, status, differs, shift: tl.int64, first_tile, num_tiles, NUM_BLOCKS: tl.constexpr,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, NUM_FIELDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    IS_UE8M0: tl.constexpr, AMAX_FLOOR: tl.constexpr, ROUND_TO_BF16: tl.constexpr, SATURATES: tl.constexpr,
    IS_ALIGNED: tl.constexpr, CHECK: tl.constexpr, WRITE: tl.constexpr, COMPARE: tl.constexpr,
):  # fmt: skip
    """One program quantizes `NUM_BLOCKS` blocks."""
    first = tl.program_id(0) * NUM_BLOCKS
    for index in tl.static_range(NUM_BLOCKS):
        if first + index < num_tiles:
            _quantize_tile(
                matrix, tile_rows, status, differs, shift, first_tile + first + index, SOURCE, TARGET, NUM_FIELDS, BLOCK_N,
                BLOCK_K, TILE_N, TILE_K, IS_UE8M0, AMAX_FLOOR, ROUND_TO_BF16, SATURATES, IS_ALIGNED, CHECK, WRITE, COMPARE,
            )  # fmt: skip


@triton.jit
def _quantize_tile(
    matrix, tile_rows, status, differs, shift, tile,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, NUM_FIELDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    IS_UE8M0: tl.constexpr, AMAX_FLOOR: tl.constexpr, ROUND_TO_BF16: tl.constexpr, SATURATES: tl.constexpr,
    IS_ALIGNED: tl.constexpr, CHECK: tl.constexpr, WRITE: tl.constexpr, COMPARE: tl.constexpr,
):  # fmt: skip
    """Quantize one block; the arithmetic is `reference.quantize_reference`, bit for bit."""
    row = _load_row(matrix, tile_rows, tile, NUM_FIELDS)
    source = (tl.load(row + 0) + shift).to(tl.pointer_type(SOURCE))
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
    if WRITE or COMPARE:
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
        target_at += n[:, None] * target_row + k[None, :]
        scale_at = scale + block_n * scale_row + block_k
        if WRITE:
            tl.store(target_at, code, mask=mask)
            tl.store(scale_at, s)
        if COMPARE:
            held = tl.load(target_at.to(tl.pointer_type(tl.int8), bitcast=True), mask=mask, other=0)
            is_other = (code.to(tl.int8, bitcast=True) != held) & mask
            num_other = tl.sum(tl.sum(is_other.to(tl.int32), axis=1), axis=0)
            num_other += (tl.load(scale_at).to(tl.int32, bitcast=True) != s.to(tl.int32, bitcast=True)).to(tl.int32)
            tl.store(differs + tl.load(row + 11), 1, mask=num_other > 0)


@triton.jit
def _bits(x):
    """The bits of values of any dtype."""
    if x.dtype.primitive_bitwidth == 8:
        bits = x.to(tl.int8, bitcast=True)
    elif x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True)
    elif x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True)
    else:
        bits = x.to(tl.int64, bitcast=True)
    return bits


@triton.jit(do_not_specialize=["shift", "first_tile", "num_tiles"])
def _copy_tiles(
    matrix, tile_rows, status, differs, shift: tl.int64, first_tile, num_tiles,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, NUM_FIELDS: tl.constexpr,
    TILE: tl.constexpr, RULE: tl.constexpr,
    IS_ALIGNED: tl.constexpr, CHECK: tl.constexpr, WRITE: tl.constexpr, COMPARE: tl.constexpr,
):  # fmt: skip
    """One program copies one segment of one row. `RULE` is a `Check`: what to flag."""
    tile = first_tile + tl.program_id(0)
    row = _load_row(matrix, tile_rows, tile, NUM_FIELDS)
    source = (tl.load(row + 0) + shift).to(tl.pointer_type(SOURCE))
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
    target_at = target + n * target_row + first_k + k
    if WRITE:
        tl.store(target_at, value, mask=mask)
    if COMPARE:
        is_other = _bits(tl.load(target_at, mask=mask, other=0)) != _bits(value)
        num_other = tl.sum((is_other & mask).to(tl.int32), axis=0)
        tl.store(differs + tl.load(row + 11), 1, mask=num_other > 0)
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
