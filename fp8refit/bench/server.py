"""An engine's own HTTP server in the refit benchmark, and clients that keep it busy."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar

from fp8refit.bench.engine import Strategy
from fp8refit.errors import UnsupportedEngineError

T = TypeVar("T")
_BOOT_S = 600.0
_ANSWER_S = 120.0
_END_S = 15.0
_LOG_CHARS = 2000
_REFUSED_S = 0.02
"""Before a client's next request, after one that failed."""
_FAULTS = (OSError, http.client.HTTPException, LookupError, TypeError, ValueError)
"""What an answer that is none, or not the expected one, raises."""


class BenchServer:
    """Implements `fp8refit.bench.engine.BenchEngine`: a server on this machine, which ends with it.

    Args:
        module: The Python module that serves.
        settings: Its options, as the command line takes them; True for a flag.
        complete: Has it continue a prompt greedily by a number of tokens, and returns whether it did. Its first argument posts
            JSON to a route and returns what is answered.

    Raises:
        UnsupportedEngineError: The server ends before it answers; gives the end of its log.
    """

    worker: object | None = None
    strategies: Sequence[Strategy] = ()

    def __init__(
        self,
        module: str,
        settings: Mapping[str, object],
        complete: Callable[[Callable[[str, object], Any], Sequence[int], int], bool],
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port: int = listener.getsockname()[1]
        self.settings = dict(settings)
        self.candidate: object = f"http://127.0.0.1:{port}"
        self._complete = complete
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the server
        flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in settings.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *flags, "--host=127.0.0.1", f"--port={port}"],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def complete(self, prompt: Sequence[int], num_tokens: int) -> bool:
        """Have the server continue a prompt greedily, and return whether it did. May be called by many threads at once."""
        try:
            return self._complete(self._post, prompt, num_tokens)
        except _FAULTS:
            return False

    def close(self) -> None:
        """End the server, and every process that it has started."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _wait(self) -> None:
        """Until it answers."""
        end_s = time.monotonic() + _BOOT_S
        while True:
            try:
                self._post("/health", None)
            except urllib.error.HTTPError:
                pass  # it is not ready
            except OSError:
                pass  # nothing listens yet
            else:
                return
            if self._process.poll() is not None or time.monotonic() > end_s:
                self._log.seek(0)
                raise UnsupportedEngineError(f"the server did not start: {self._log.read()[-_LOG_CHARS:]}")
            time.sleep(0.2)

    def _post(self, route: str, body: object) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.candidate}{route}", data, {"Content-Type": "application/json"})
        with self._opener.open(request, timeout=_ANSWER_S) as answer:
            return json.loads(answer.read() or b"null")


class Clients(Generic[T]):
    """Threads that ask without end, each again once it has its answer.

    Args:
        ask: Takes the number of a request, which begins with that of the client. What it returns is kept; a false answer is
            a failure. What it raises ends its client, and is raised when all are stopped.
        count: How many there are.
    """

    def __init__(self, ask: Callable[[int], T], count: int) -> None:
        self.answers: list[T] = []
        self._ask, self._count = ask, count
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(count)
        self._ends: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._ends = [self._pool.submit(self._go_on, number) for number in range(self._count)]
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._pool.shutdown()
        for end in self._ends:
            end.result()

    def _go_on(self, number: int) -> None:
        while not self._is_over.is_set():
            answer = self._ask(number)
            self.answers.append(answer)
            if not answer:
                time.sleep(_REFUSED_S)
            number += 1
