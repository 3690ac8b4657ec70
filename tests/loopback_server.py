"""An ASGI app behind uvicorn on loopback, with its event loop in a thread of its own."""

import asyncio
import socket
import threading
from typing import Any

import uvicorn


class LoopbackServer:
    """Serves from the time that it is made until it is closed.

    Args:
        app: An ASGI app.
        settings: Of uvicorn.
    """

    def __init__(self, app: Any, **settings: Any) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="error", lifespan="off", interface="asgi3", **settings)
        )
        self._serving = self.start(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            assert not self._serving.done(), self._serving.result()

    def start(self, steps: Any) -> Any:
        """Begin something in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(steps, self._loop)

    def do(self, steps: Any) -> Any:
        """Do something there, and wait for it."""
        return self.start(steps).result(20)

    def stop(self) -> None:
        """Take no more requests."""
        self._server.should_exit = self._server.force_exit = True
        self._serving.result(20)
        self._socket.close()

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
