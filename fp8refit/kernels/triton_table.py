"""The work table on a GPU: a matrix of addresses, and the launches of the kernels that walk it."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fp8refit.kernels.products import LowRank, fields_of, of_boxes
from fp8refit.kernels.rows import SOURCE, Rows, by_place, join_rows, number_tiles, rows_of_all
from fp8refit.kernels.triton_launch import Launch, launch_of, on_device
from fp8refit.kernels.work import ALIGNMENT_BYTES, Action, Task, WorkTable
from fp8refit.live.layout_guard import Addresses, addresses_of
from fp8refit.live.slots import Op

_NOWHERE = -1
_FLAGS_ALIGNMENT = 4
"""The number of flags is a multiple of this, because kernels are compiled for pointers that are multiples of 16 bytes."""


class TritonTable(WorkTable):
    """The work table of a GPU."""

    def __init__(
        self,
        tasks: Sequence[Task],
        device: torch.device,
        places: Sequence[int] | None = None,
        *,
        num_places: int | None = None,
    ) -> None:
        self._lay_out(rows_of_all(tasks, range(len(tasks)) if places is None else places, num_places), device)

    @classmethod
    def joined(cls, tables: Sequence[WorkTable]) -> "TritonTable":
        """Join tables of one device into one with the places of all, in order."""
        parts = [table for table in tables if isinstance(table, TritonTable)]
        whole = cls.__new__(cls)
        whole._lay_out(join_rows([part._rows for part in parts]), parts[0]._device)
        return whole

    def _lay_out(self, rows: Rows, device: torch.device) -> None:
        """Number the tiles of every row, kind by kind, and allocate."""
        self._rows, self._device = rows, device
        tile_rows, self._tiles = number_tiles(rows)  # with the first tiles of every kind
        self._first_rows: list[int] = np.searchsorted(rows.places, np.arange(rows.num_places + 1)).tolist()
        self._pointed_at = by_place(rows, rows.fields[:, SOURCE] - rows.byte_offsets)
        """The source address that the rows of each place have."""
        self._adds = by_place(rows, rows.products)
        """The products that the rows of each place have."""
        with torch.inference_mode(False):  # tensors that can be written in any mode
            self._allocate(rows, tile_rows)
        self._done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._has_run = False
        """Whether work was launched, or begun to be, whose flags are not yet being copied to the host."""
        self._graphs: dict[tuple[bool, Action], torch.cuda.CUDAGraph | None] = {}
        self._compiled: set[tuple[bool, Action]] = set()
        self._of_kinds: dict[tuple[int, bool, Action], Launch] = {}
        """By index of the kind."""
        self._single_launches: dict[tuple[int, bool, Action], list[tuple[Launch, int, int]]] = {}
        """The launches for one place, by that place."""
        self.num_device_bytes = sum(
            each.nbytes for each in (self._matrix.there, self._products.there, self._tile_rows, self._status)
        )

    def _allocate(self, rows: Rows, tile_rows: np.ndarray) -> None:
        device, pinned = self._device, self._device.type == "cuda"
        self._matrix = _Numbers(rows.fields, device)
        adds_any = any(kind.product is not None for kind in rows.kinds)
        self._products = _Numbers(of_boxes(rows.products, rows.starts)[: None if adds_any else 0], device)
        self._tile_rows = torch.from_numpy(tile_rows).to(device)
        num_flags = -(-max(rows.num_tasks, 1) // _FLAGS_ALIGNMENT) * _FLAGS_ALIGNMENT
        self._status = torch.zeros((3, num_flags), dtype=torch.int32, device=device)
        """For each task whether its values are bad; and after these flags, for each how many elements and scales differ."""
        self._host_status = torch.zeros(self._status.shape, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._status_view = self._host_status.numpy()
        self._counts_view = self._status_view[1:].reshape(-1, 2).view(np.uint32)
        self._are_changes = False
        """Whether they are of what was written over."""
        self._arrays = self._matrix.there, self._tile_rows, self._status[0], self._status[1:], self._products.there

    @override
    def refresh(self, sources: Sequence[Tensor], addresses: Addresses | None = None) -> bool:
        self.forget_flags()
        return self._point(0, addresses if addresses is not None else addresses_of(sources))

    @override
    def compile(self, *, check: bool, action: Action = Action.WRITE) -> None:
        if (check, action) in self._compiled:
            return
        with on_device(self._device):
            for launch, _, _ in self._launches(0, self._rows.num_places, check=check, action=action):
                launch.compile_for_tiles(self._arrays)
        self._compiled.add((check, action))

    @override
    def launch(self, *, check: bool, action: Action = Action.WRITE, begun: torch.cuda.Event | None = None) -> None:
        self._has_run, self._are_changes = True, action is Action.COUNT
        with on_device(self._device):
            if self._done is None:
                self._launch_all(check=check, action=action)
            else:
                self._launch_or_replay(check=check, action=action, begun=begun)
                self._done.record(torch.cuda.current_stream(self._device))
        self._has_run = False

    @override
    def run(
        self,
        first: int,
        sources: Sequence[Tensor],
        addresses: Addresses | None = None,
        *,
        products: Sequence[LowRank | None] = (),
        check: bool,
        action: Action = Action.WRITE,
    ) -> bool:
        shift = 0
        if len(sources) == 1 and self._pointed_at[first] != _NOWHERE:
            key = first, check, action
            launches = self._single_launches.get(key)
            if launches is None:
                launches = self._single_launches[key] = self._launches(first, first + 1, check=check, action=action)
            shift = sources[0].data_ptr() - int(self._pointed_at[first])
            if launches and shift % ALIGNMENT_BYTES:
                return False
        else:
            launches = self._launches(first, first + len(sources), check=check, action=action)
            known = addresses if addresses is not None else addresses_of(sources)
            if launches and not self._point(first, known):
                return False
        if any(products):
            self._point_products(first, fields_of(products))
        self._are_changes = action is Action.COUNT
        self._has_run |= bool(launches)
        with on_device(self._device):
            for launch, first_tile, num_tiles in launches:
                launch.launch_tiles(self._arrays, shift, first_tile, num_tiles)
        return True

    def _point(self, first: int, addresses: Addresses) -> bool:
        """Point the rows of the places from `first` on at other addresses; False if their alignment is different."""
        if addresses.tobytes() == self._pointed_at[first : first + len(addresses)].tobytes():
            return True
        rows = self._rows
        start, end = self._first_rows[first], self._first_rows[first + len(addresses)]
        by_row = addresses[rows.places[start:end] - first]
        if not np.array_equal(by_row % ALIGNMENT_BYTES, rows.alignment[start:end]):
            return False
        self._pointed_at[first : first + len(addresses)] = _NOWHERE  # until all is done
        self._matrix.here[start:end, SOURCE] = by_row + rows.byte_offsets[start:end]
        self._matrix.upload(start, end)
        self._pointed_at[first : first + len(addresses)] = addresses
        return True

    def _point_products(self, first: int, products: np.ndarray) -> None:
        """Have the rows of the places from `first` on add other products."""
        last = first + len(products)
        is_added = len(self._products.here) > 0  # else no place that has a product has a row
        if not is_added or products.tobytes() == self._adds[first:last].tobytes():
            return
        rows, start, end = self._rows, self._first_rows[first], self._first_rows[last]
        by_row = products[rows.places[start:end] - first]
        self._adds[first:last] = _NOWHERE
        self._products.here[start:end] = of_boxes(by_row, rows.starts[start:end])
        self._products.upload(start, end)
        self._adds[first:last] = products

    def _launch_or_replay(self, *, check: bool, action: Action, begun: torch.cuda.Event | None) -> None:
        """Launch the kernels the first time, which compiles them; later replay the launches as one CUDA graph.

        Without the graph, the device would be idle while the host launches one kind after another.
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
            # Not `torch.cuda.graph`, which frees all cached memory first. In this mode, other threads may go on using CUDA.
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
        for launch, first_tile, num_tiles in self._launches(0, self._rows.num_places, check=check, action=action):
            launch.launch_tiles(self._arrays, 0, first_tile, num_tiles)
        self._host_status.copy_(self._status, non_blocking=True)

    def _launches(self, first: int, last: int, *, check: bool, action: Action) -> list[tuple[Launch, int, int]]:
        """The launches for the places from `first` to before `last`: each one's first tile and number of tiles."""
        start, end = self._first_rows[first], self._first_rows[last]
        launches = []
        for index, (kind, firsts) in enumerate(self._tiles):
            if count := firsts[end] - firsts[start]:
                key = index, check, action
                launch = self._of_kinds.get(key)
                if launch is None:
                    checks = check or kind.op is Op.COPY_SCALES
                    launch = self._of_kinds[key] = launch_of(kind, self._device, check=checks, action=action)
                launches.append((launch, firsts[start], count))
        return launches

    @override
    def bad_tasks(self) -> list[int]:
        self._settle()
        flagged: list[int] = self._status_view[0].nonzero()[0].tolist()
        if flagged:
            self._drop(slice(0, 1))
        return flagged

    @override
    def differing_tasks(self) -> list[int]:
        return [] if self._are_changes else list(self._take_counts())

    @override
    def changes(self) -> dict[int, tuple[int, int]]:
        return self._take_counts() if self._are_changes else {}

    def _take_counts(self) -> dict[int, tuple[int, int]]:
        self._settle()
        view = self._counts_view
        counts = {task: (int(view[task, 0]), int(view[task, 1])) for task in np.unique(view.nonzero()[0]).tolist()}
        if counts:
            self._drop(slice(1, 3))
        return counts

    def _settle(self) -> None:
        """Wait until everything that was launched is done and its flags are on the host."""
        if self._has_run:
            self._host_status.copy_(self._status, non_blocking=True)
            if self._done is not None:
                self._done.record(torch.cuda.current_stream(self._device))
            self._has_run = False
        if self._done is not None:
            self._done.synchronize()

    def _drop(self, which: slice) -> None:
        self._has_run = True  # if this is interrupted, they are copied and dropped again
        self._status[which].zero_()
        self._status_view[which] = 0
        self._has_run = False

    @override
    def forget_flags(self) -> None:
        self._settle()
        if self._status_view.any():
            self._drop(slice(0, 3))

    @override
    def release(self) -> None:
        """A table holds addresses only."""


class _Numbers:
    """An int64 matrix on a device, with a copy on the host from which changed rows are uploaded.

    Attributes:
        here: On the host.
        there: On the device.
    """

    def __init__(self, values: np.ndarray, device: torch.device) -> None:
        self._host = torch.empty(values.shape, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.here: np.ndarray = self._host.numpy()
        self.here[:] = values
        self.there = torch.empty(values.shape, dtype=torch.int64, device=device)
        self.upload(0, len(values))

    def upload(self, start: int, end: int) -> None:
        """Upload some rows, on the current stream. They may be changed again once that is done."""
        self.there[start:end].copy_(self._host[start:end], non_blocking=True)


@lru_cache(maxsize=16)
def _capture_stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """The stream that a thread captures on, always the same one.

    A capture also records what others launch on its stream. torch hands out 32 streams in turn, so a new one for each
    capture would soon be one that the trainer or the engine uses.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
