"""Runs coroutines without an event loop, and starts calls while their caller continues: a blocking one in a thread."""

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def run(steps: Coroutine[Any, Any, T], *, engine: str = "this engine") -> T:
    """Run a coroutine of a synchronous engine, which never suspends and so needs no event loop."""
    try:
        steps.send(None)
    except StopIteration as result:
        value: T = result.value
        return value
    steps.close()
    raise AssertionError(f"{engine} is synchronous, and suspended")


async def begun(steps: Coroutine[Any, Any, T], *, num_steps: int = 1) -> Awaitable[T]:
    """Start a call in the running event loop, and return its result to await.

    Args:
        steps: The call.
        num_steps: How often the loop has to run until the call has sent what it sends.
    """
    task = asyncio.ensure_future(steps)
    try:
        for _ in range(num_steps):
            await asyncio.sleep(0)
    except BaseException:
        task.cancel()
        raise
    return task


class InThread(Generic[T]):
    """The result of steps that never suspend. Awaiting it blocks without suspending; outside a coroutine, call `result`.

    Args:
        steps: Steps of a synchronous engine's driver. They start at once.
    """

    def __init__(self, steps: Coroutine[Any, Any, T]) -> None:
        self._steps = steps
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fp8refit-call", daemon=True)
        self._thread.start()

    def __await__(self) -> Generator[None, None, T]:
        yield from ()
        return self.result()

    def result(self) -> T:
        """Wait for it. Raises what the steps raised."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._value.pop()

    def _run(self) -> None:
        try:
            self._value.append(run(self._steps))
        except BaseException as error:  # noqa: BLE001 - raised again by whoever awaits it
            self._error = error
