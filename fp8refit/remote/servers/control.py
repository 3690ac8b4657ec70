"""The control plane of an engine: pausing, refusing and resuming requests around a refit."""

from collections.abc import Sequence
from typing import Protocol

from fp8refit.config import RefitConfig


class ControlPlane(Protocol):
    """Keeps requests from an engine while its weights are written. The methods of a synchronous engine never suspend."""

    async def pause(self, config: RefitConfig) -> int:
        """Let no request run until `resume` or `refuse`. Returns how many requests `config.in_flight` applied to.

        Raises:
            EngineBusyError: Requests did not finish in time; they keep running.
        """
        ...

    async def resume(self) -> None:
        """Admit and run requests again, as before the pause or refusal."""
        ...

    async def refuse(self, reason: str) -> None:
        """Refuse every request at admission with `EngineDirtyError(reason)`, and end waiting ones.

        May be repeated; `resume` ends it.
        """
        ...

    async def flush_caches(self) -> None:
        """Drop everything computed under the old policy: prefix, multimodal and encoder caches.

        Called after `pause` and before the first byte is written, so nothing is computed until `resume`.

        Raises:
            CacheFlushError: The engine kept some of it.
        """
        ...

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """The engine's token ids of each prompt.

        Raises:
            UnsupportedEngineError: The engine has no tokenizer.
        """
        ...

    async def publish_version(self, version: int) -> None:
        """Tell the engine its policy version, if it can show one in its outputs."""
        ...
