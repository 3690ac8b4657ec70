"""Trainers in processes of their own, which push policies, bad ones too, and are killed while they do.

They are forks of a process that has imported what they need and has not touched a GPU, so that a killed one is cheap: another
is ready by then. What runs in a trainer's process imports torch when it is called; the others import this module too.
"""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
IMPORTED_IN = os.getpid()
Way = Literal["broadcast", "stream", "mapped"]
"""How a policy comes to a server: in a broadcast, by a bucket that is read again and again, or where it lies."""
Poison = Literal["nan", "shape", "name"]
Step = Literal["pause", "write", "resume"]
"""The server lets requests come to their ends, or keeps them; the ranks write; requests go on."""
READY_S = 120.0
_BEGINS = ("begin", "stream", "take", "write")
"""Orders to the ranks with which a write begins."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a trainer shall push.

    Args:
        policy: Its number.
        way: How it comes to the server.
        in_flight: What becomes of requests that run.
        poison: What is wrong with it: NaN in one tensor, a tensor of another shape, or a name that is missing.
        dies_after: With which step it posts the order after which the trainer kills itself; None if it does not.
        dies_s: How many seconds after that.
        seed: For which tensor is bad.
    """

    policy: int
    way: Way
    in_flight: str
    poison: Poison | None = None
    dies_after: Step | None = None
    dies_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What came of an order."""

    error: str | None = None
    message: str = ""
    is_dirty: bool = False
    version: int = 0
    fingerprints: tuple[str, ...] = ()
    begin_s: float = 0.0
    """When the trainer began to push."""
    end_s: float = 0.0
    write_s: float = 0.0
    """From the order with which the write begins to the order to go on."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all trainers of a server share."""

    url: str
    shape: str
    device: str = "cpu"
    bucket_bytes: int = 1 << 20
    timeout_s: float = 30.0


class Trainer:
    """One trainer's process.

    Args:
        setup: Its server.
    """

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *_modules(setup)])
        self._line, there = context.Pipe()
        with _surroundings():
            self._process = context.Process(target=_work, args=(there, setup), daemon=True)
            self._process.start()
        there.close()
        self._is_ready = False

    def begin(self, order: Order) -> float:
        """Let it push, once it can; when that was."""
        if not self._is_ready:
            assert self._line.poll(READY_S), "a trainer does not start"
            self._is_ready = self._line.recv()
        begin_s = time.monotonic()
        self._line.send(order)
        return begin_s

    def end(self, timeout_s: float | None = None) -> Pushed | None:
        """What came of it; None if the trainer died, or is not done by then."""
        try:
            if timeout_s is not None and not self._line.poll(timeout_s):
                return None
            pushed: Pushed = self._line.recv()
        except (EOFError, OSError):
            return None
        return pushed

    def kill(self) -> None:
        """Whatever it does."""
        self._process.kill()
        self._process.join()

    @property
    def was_killed(self) -> bool:
        """Whether it ended by SIGKILL."""
        self._process.join(READY_S)
        return self._process.exitcode == -signal.SIGKILL


class Trainers:
    """Trainers that are made ready ahead.

    Args:
        setup: Their server.
        num_ahead: How many are ready, or soon will be.
    """

    def __init__(self, setup: Setup, num_ahead: int) -> None:
        self._setup = setup
        self._ahead = deque(Trainer(setup) for _ in range(num_ahead))

    def take(self) -> Trainer:
        """The one that was started first; another is started."""
        self._ahead.append(Trainer(self._setup))
        return self._ahead.popleft()

    def close(self) -> None:
        for trainer in self._ahead:
            trainer.kill()


def _modules(setup: Setup) -> list[str]:
    """What trainers need, and nothing that touches a GPU when it is imported: no fork could use it then."""
    adapters = [point.module for point in entry_points(group="fp8refit.engines")]
    # What the first push of a fork would import, for three seconds.
    late = ["fp8refit_transformers.engine"] if setup.device == "cpu" else ["triton"]
    return ["torch", *late, "fp8refit.bench.shapes", *adapters]


@contextmanager
def _surroundings() -> Iterator[None]:
    """Of the process that forks, which is started with the first trainer: it finds this module, and asks no driver for GPUs."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, {"PYTHONPATH": paths, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        yield


def _work(line: Connection, setup: Setup) -> None:
    assert os.getpid() != IMPORTED_IN, "a fork, or its start takes seconds"
    import torch

    torch.set_num_threads(1)
    if setup.device != "cpu":
        torch.cuda.set_device(setup.device)
    desk = _Desk(setup)
    line.send(True)
    while True:
        try:
            order = line.recv()
        except EOFError:
            return
        line.send(desk.push(order))


class _Desk:
    """What a trainer has: room for a policy, and refitters that it keeps."""

    def __init__(self, setup: Setup) -> None:
        from tests.gpu import policies
        from tests.oracle.bands import Bands

        self._setup = setup
        self._fill = policies.fill_policy
        self._tensors = policies.allocate(setup.shape)
        self._bands = Bands(setup.shape)
        self._refitters: dict[tuple[str, str], Any] = {}
        policies.fill_policy(self._tensors, 0)  # loads what it is made with

    def _refitter(self, way: Way, in_flight: str) -> Any:
        from fp8refit import Refitter

        if (way, in_flight) not in self._refitters:
            self._refitters[way, in_flight] = Refitter(
                self._setup.url,
                transport="collective" if way == "broadcast" else "auto",
                in_flight=in_flight,
                collective={"stage": "ahead" if in_flight == "continue" else "during"},
                bucket_bytes=self._setup.bucket_bytes,
                timeout_s=self._setup.timeout_s,
            )
        return self._refitters[way, in_flight]

    def push(self, order: Order) -> Pushed:
        import torch

        from fp8refit import RefitError

        self._bands.sign(self._fill(self._tensors, 1 + order.policy), order.policy)
        tensors = poisoned(self._tensors, order.poison, order.seed) if order.poison else self._tensors
        if self._setup.device != "cpu":
            torch.cuda.synchronize()
        source = (lambda: iter(tensors.items())) if order.way == "stream" else tensors
        refitter = self._refitter(order.way, order.in_flight)
        watch = _Watch(order)
        found: dict[str, Any] = {"begin_s": time.monotonic()}
        try:
            with watch.watching():
                version = refitter.refit(source).version
            found |= {"end_s": time.monotonic(), "version": version, "fingerprints": tuple(refitter.fingerprints())}
        except RefitError as error:
            found |= {"end_s": time.monotonic(), "error": type(error).__name__, "message": str(error)}
        return Pushed(**found, is_dirty=refitter.is_dirty, write_s=watch.write_s)


def poisoned(tensors: dict[str, Any], poison: Poison, seed: int) -> dict[str, Any]:
    """The same with one of them spoilt."""
    chance = random.Random(seed)
    spoilt, name = dict(tensors), chance.choice(list(tensors))
    if poison == "name":
        del spoilt[name]
    elif poison == "shape":
        spoilt[name] = spoilt[name][:-1]
    else:
        spoilt[name].view(-1)[chance.randrange(spoilt[name].numel())] = float("nan")
    return spoilt


class _Watch:
    """Notes when a push comes to a step, and ends this process some time after one of them.

    Args:
        order: Which, and when.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._begins_s: dict[Step, float] = {}

    @property
    def write_s(self) -> float:
        """How long the write took; 0 if it did not come to its end."""
        return (
            self._begins_s["resume"] - self._begins_s["write"] if self._begins_s.keys() >= {"write", "resume"} else 0.0
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        from fp8refit.remote.servers import connection
        from fp8refit.remote.servers.orders import Pause, Send

        post = connection.Connection.post

        def note(line: connection.Connection, order: Any, *, timeout_s: float) -> Any:
            if isinstance(order, Pause):
                self._begin("pause")
            elif isinstance(order, Send) and (len(order.messages) > 1 or _step_of(order.messages[0]) in _BEGINS):
                self._begin("write")
            answer = post(line, order, timeout_s=timeout_s)
            if answer.is_resumed:
                self._begin("resume")
            return answer

        with patch.object(connection.Connection, "post", note):
            yield

    def _begin(self, step: Step) -> None:
        if step not in self._begins_s and step == self._order.dies_after:
            threading.Thread(target=self._die, daemon=True).start()
        self._begins_s.setdefault(step, time.monotonic())

    def _die(self) -> None:
        time.sleep(self._order.dies_s)
        os.kill(os.getpid(), signal.SIGKILL)


def _step_of(message: str) -> str:
    from fp8refit.remote.protocol.messages import Request

    return Request.model_validate_json(message).order.step
