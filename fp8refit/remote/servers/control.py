"""What is done with an engine around a refit, by whoever drives it: the adapter's driver, or the process that hosts it."""

from collections.abc import Sequence
from typing import Protocol

from fp8refit.config import RefitConfig


class ControlPlane(Protocol):
    """Keeps requests from an engine while its weights are written. The methods of a synchronous engine never suspend."""

    async def pause(self, config: RefitConfig) -> int:
        """Let no request run from here on until `resume` or `refuse`, and give the number that `config.in_flight` met.

        Raises:
            EngineBusyError: Requests did not finish in time; they go on as if nothing had been asked.
        """
        ...

    async def resume(self) -> None:
        """Admit and run requests again, leaving no trace of the pause, or of a refusal before it."""
        ...

    async def refuse(self, reason: str) -> None:
        """From now on refuse every request at admission with `EngineDirtyError(reason)`, and end those that wait.

        May be repeated; `resume` ends it.
        """
        ...

    async def flush_caches(self) -> None:
        """Drop everything computed under the policy that is about to be replaced: prefix, multimodal and encoder caches.

        Comes after `pause`, before the first byte is written: nothing is computed from then on until `resume`.

        Raises:
            CacheFlushError: The engine kept some of it.
        """
        ...

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """The token ids of each prompt, as the engine would have them.

        Raises:
            UnsupportedEngineError: The engine has no tokenizer.
        """
        ...

    async def publish_version(self, version: int) -> None:
        """Tell the engine its policy version, where it can show one on its outputs."""
        ...
