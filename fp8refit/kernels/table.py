"""Makes work tables: `compile_table` from tasks, `join_tables` from other tables.

`refresh` points a table at new source tensors of the same layout; `launch` runs it, and `run` a part of it. On CUDA a table
is a matrix of addresses that Triton kernels walk; on the CPU it is the torch reference.
"""

from collections.abc import Sequence

import torch

from fp8refit.kernels.reference_table import ReferenceTable
from fp8refit.kernels.work import Task, WorkTable


def compile_table(
    tasks: Sequence[Task], device: torch.device, places: Sequence[int] | None = None, *, num_places: int | None = None
) -> WorkTable:
    """Compile `tasks`. The caller keeps their tensors alive, since the table may hold only addresses.

    Args:
        tasks: The tasks, with all tensors on `device`.
        device: The device.
        places: For each task, the index of its source in the `sources` of `refresh`; experts of one stack share a
            source. By default every task has its own.
        num_places: Number of sources, if the last of them have no task.
    """
    if device.type == "cuda":
        from fp8refit.kernels.triton_table import TritonTable

        return TritonTable(tasks, device, places, num_places=num_places)
    return ReferenceTable(tasks, places, num_places=num_places)


def join_tables(tables: Sequence[WorkTable]) -> WorkTable:
    """One table with the tasks and places of several, one after another."""
    first = tables[0]
    if isinstance(first, ReferenceTable):
        return ReferenceTable.joined(tables)
    from fp8refit.kernels.triton_table import TritonTable

    return TritonTable.joined(tables)
