"""Ranks of a trainer, each a process of its own in one group, gloo or NCCL, which do what a test says."""

import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

TIMEOUT_S = 60.0
PRELOADED = [
    "fp8refit",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
]
"""Modules that are imported once, in the process from which all ranks are forked; on a busy machine they take half a minute."""


class TrainerRanks:
    """Processes that are started once, and run functions of the modules beside this one."""

    def __init__(self, size: int, store: str, *, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, rank, size, store, backend), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, scenario: Callable[..., Any], *args: Any, dying: Sequence[int] = ()) -> list[Any]:
        """What `scenario(rank, *args)` gives on each rank that lives on, in order; an error as its type and text."""
        for pipe in self._pipes:
            pipe.send((scenario, args))
        results = []
        for rank in sorted({*range(len(self._pipes))} - {*dying}):
            assert self._pipes[rank].poll(TIMEOUT_S), f"rank {rank} hangs in {scenario.__name__}"
            results.append(self._pipes[rank].recv())
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def serve(orders: Connection, rank: int, size: int, store: str, backend: str) -> None:
    """Run what comes, until nobody sends any more."""
    faulthandler.enable()  # a rank that crashes shows where
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    while True:
        try:
            scenario, args = orders.recv()
        except EOFError:
            return
        try:
            result = scenario(rank, *args)
        except Exception as error:  # noqa: BLE001 - it is the result
            traceback.print_exc()
            result = f"{type(error).__name__}: {error}"
        orders.send(result)
