"""The ranks of a trainer, each a process of its own that can be killed, beside the process that has the engine.

`Ranks` is the engine's side. In a rank a `Trainer` sends with the trainer's own code. Its `engine` calls what that side serves.
"""

import importlib
import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

import torch

from tests.engines.clients import Pairs
from tests.serving import free_port

WAIT_S = 60
NUM_CALLS = 4
"""After which a trainer dies that calls for each bucket. One that sends its buckets in one call dies between two of them."""
ALONE_S = 5
"""How long ranks go on after one has raised or is gone. Others may wait for it, and then the trainer is gone, as with Ray's."""


class Engine:
    """As a rank sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=4)
        self.num_calls: int | None = None
        """After so many the rank dies."""

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What every rank of the engine answers."""
        with self._lock:
            self._connection.send((method, arguments, options))
            error, answer = self._connection.recv()
            self.num_calls = None if self.num_calls is None else self.num_calls - 1
            if self.num_calls == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        if error:
            raise RuntimeError(error)
        return answer

    def fire(self, method: str, *arguments: Any, **options: Any) -> Future:
        return self._pool.submit(self.call, method, *arguments, **options)


class Trainer:
    """One rank of a trainer."""

    calls_for_each: ClassVar[bool] = False
    """Whether each bucket is a call."""

    def __init__(self, rank: int, num_ranks: int, engine: Engine) -> None:
        self.rank, self.num_ranks, self.engine = rank, num_ranks, engine

    def push(
        self, pairs: Iterator[tuple[str, torch.Tensor]], described: list[tuple[str, torch.dtype, list[int]]]
    ) -> None:
        """Send them all. They are described, but each is there only when its turn comes, or the rank is dead by then."""
        raise NotImplementedError


class Ranks:
    """Starts them, tells them to push, and serves their calls.

    Args:
        trainer: Module and class, as `tests.vllm.clients:OpenRlhfTrainer`.
        number: Of ranks.
        num_engine_ranks: What the trainer is told of.
        serve: Does a call.
    """

    def __init__(self, trainer: str, number: int, num_engine_ranks: int, serve: Callable[..., Any]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.vllm.clients", "vllm.distributed.device_communicators.pynccl"])
        self._serve, self._pool = serve, ThreadPoolExecutor(max_workers=number)
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(number)}
        self._told: list[Connection] = []
        self._calls: list[Connection] = []
        self._processes = []
        self.are_gone = False
        """Whether any is: the others are of no use without it."""
        for rank in range(number):
            told, ours = context.Pipe()
            calls, called = context.Pipe()
            environment = rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(
                target=run, args=(trainer, rank, num_engine_ranks, environment, told, calls), daemon=True
            )
            process.start()
            told.close()
            calls.close()
            self._told.append(ours)
            self._calls.append(called)
            self._processes.append(process)
        self._wait()

    def push(self, pairs: Pairs, *, dies: bool = False) -> None:
        data = io.BytesIO()
        torch.save(pairs, data)
        for connection in self._told:
            connection.send((data.getvalue(), dies))
        self._wait()

    def kill(self) -> None:
        self.are_gone = True
        for process in self._processes:
            process.kill()
            process.join()

    def _wait(self) -> None:
        """Until every rank is done or gone; raises what the first one raised, and ends those that wait for it."""
        errors, open_ends = [], [*self._told]
        while open_ends:
            is_alone = bool(errors) or self.are_gone
            ready = wait([*open_ends, *self._calls], ALONE_S if is_alone else WAIT_S)
            assert ready or is_alone, "nothing comes from the trainer"
            if not ready:
                self.kill()
                break
            for connection in ready:
                try:
                    message = connection.recv()
                except EOFError:
                    self.are_gone = True
                    open_ends = [end for end in open_ends if end is not connection]
                    self._calls = [end for end in self._calls if end is not connection]
                    continue
                if connection in self._calls:
                    self._pool.submit(self._answer, connection, message)
                else:
                    open_ends.remove(connection)
                    errors += [message] if message else []
        if errors:
            raise RuntimeError(errors[0])

    def _answer(self, connection: Connection, message: tuple) -> None:
        method, arguments, options = message
        try:
            answer = "", self._serve(method, *arguments, **options)
        except Exception as error:  # noqa: BLE001 - the trainer's
            answer = f"{type(error).__name__}: {error}", None
        with suppress(OSError):  # the trainer is gone
            connection.send(answer)


def run(name: str, rank: int, num_ranks: int, environment: dict, told: Connection, calls: Connection) -> None:
    """In a rank."""
    os.environ.update(environment)
    for connection in (told, calls):
        os.set_inheritable(connection.fileno(), False)  # torch's manager of shared memory would hold it open
    import cpu_transfer

    cpu_transfer.install()
    cpu_transfer.allocate_on_host()
    module, _, kind = name.partition(":")
    trainer = None
    while True:
        error = ""
        try:
            if trainer is None:
                trainer = getattr(importlib.import_module(module), kind)(rank, num_ranks, Engine(calls))
            else:
                data, dies = told.recv()
                trainer.engine.num_calls = NUM_CALLS if dies and trainer.calls_for_each else None
                pairs = torch.load(io.BytesIO(data))
                trainer.push(
                    one_by_one(pairs, dies=dies and not trainer.calls_for_each),
                    [(name, tensor.dtype, list(tensor.shape)) for name, tensor in pairs],
                )
        except EOFError:
            return
        except Exception as raised:  # noqa: BLE001 - told to whoever asked
            error = f"{type(raised).__name__}: {raised}"
        told.send(error)


def one_by_one(pairs: Pairs, *, dies: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for index, pair in enumerate(pairs):
        if dies and index == len(pairs) // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair
