"""Refits several engines with one broadcast: all serve the new policy, or none does."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Never, Unpack

import torch.distributed
from torch import Tensor
from typing_extensions import override

from fp8refit.config import Options, RefitConfig, choose_config, refuse_others
from fp8refit.driver.closing import Closing
from fp8refit.driver.engine_group import EngineGroup
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import InvalidSourceError
from fp8refit.ranks.kv.calibration import Calibration, KvScaleValues
from fp8refit.report import RefitReport
from fp8refit.sources.sharded.gather import Gathered
from fp8refit.sources.source import Manifest, StateDict

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PATIENCE = 4
"""Other ranks of the trainer wait this many times `timeout_s` for the rank that prepares and pauses the engines."""


class Broadcaster(Closing):
    """Moves several engines from policy to policy at once, by a broadcast of FP8 codes and scales to all their ranks.

    An error before the first byte is written leaves every engine serving as before. A later error leaves all of them
    dirty: they refuse requests until the next push heals them.

    Args:
        engines: What `Refitter` takes, with workers in other processes: `LLM`, `AsyncLLM`, URLs of servers. The trainer
            drives them from its rank 0; other ranks may pass nothing.
        config: Options; or pass its fields as keywords. `transport` is `"collective"`. Engines on other hosts need
            `collective.host`, an address of this host.
        group: The trainer's ranks, if there are several: each of them makes a `Broadcaster` and calls `push`. The group
            must support CPU tensors (gloo in addition to NCCL).
        on_refit: See `Refitter`. Called on the trainer's rank 0.
        **options: See `Refitter`.

    Raises:
        UnsupportedEngineError: An engine cannot be refitted by broadcast; says why.

    Examples:
        >>> broadcaster = Broadcaster([llm, "http://10.0.0.2:8000"], collective={"host": "10.0.0.1"})  # doctest: +SKIP
        >>> print(broadcaster.push(model.state_dict()))                                                # doctest: +SKIP
    """

    def __init__(
        self,
        engines: Sequence[object] = (),
        *,
        config: RefitConfig | None = None,
        group: "ProcessGroup | None" = None,
        on_refit: Callable[[RefitReport], object] = lambda _: None,
        **options: Unpack[Options],
    ) -> None:
        if isinstance(engines, str) or not isinstance(engines, Iterable):
            raise TypeError(f"engines is of type {type(engines).__name__}; pass a list of engines")
        self._config = choose_config(config, options).model_copy(update={"transport": "collective"})
        self._group = group
        self._refitter: Refitter | None = None
        if group is None or torch.distributed.get_rank(group) == 0:
            self._refitter = Refitter(EngineGroup(tuple(engines)), self._config, on_refit=on_refit)

    @property
    def version(self) -> int:
        """Policy version that the engines serve; 0 on ranks of the trainer that do not drive them."""
        return self._refitter.version if self._refitter is not None else 0

    @property
    def is_dirty(self) -> bool:
        """Whether any engine holds a mixture of two policies; all of them refuse requests until the next push."""
        return self._refitter is not None and self._refitter.is_dirty

    def push(
        self,
        state_dict: StateDict,
        *,
        manifest: Manifest | None = None,
        calibration: Calibration | None = None,
        kv_scales: KvScaleValues | None = None,
        **_others: Never,
    ) -> RefitReport | None:
        """Refit every engine with `state_dict`.

        Every rank of `group` calls it, with its own shards of the same tensors in the same order. If one raises, all
        do.

        Args:
            state_dict: See `Refitter.refit`. An iterator needs a `manifest`, in whose order it is read. With `group`, a mapping
                or pairs of names and DTensors or tensors.
            manifest: See `Refitter.refit`.
            calibration: See `Refitter.refit`; every engine measures for itself.
            kv_scales: See `Refitter.refit`.

        Returns:
                The report, with the ranks of all engines numbered consecutively; None on ranks other than 0.

        Raises:
            RefitError: See `Refitter.refit`.
            TransportError: A rank did not join, died, or does not answer.
        """
        refuse_others(self.push, _others)
        with self._opened(state_dict) as weights:
            if self._refitter is None:
                return None
            return self._refitter.refit(weights, manifest=manifest, calibration=calibration, kv_scales=kv_scales)

    async def push_async(
        self,
        state_dict: StateDict,
        *,
        manifest: Manifest | None = None,
        calibration: Calibration | None = None,
        kv_scales: KvScaleValues | None = None,
        **_others: Never,
    ) -> RefitReport | None:
        """`push` for asynchronous engines, awaited in the event loop that drives them."""
        refuse_others(self.push_async, _others)
        with self._opened(state_dict) as weights:
            if self._refitter is None:
                return None
            return await self._refitter.refit_async(
                weights, manifest=manifest, calibration=calibration, kv_scales=kv_scales
            )

    def fingerprints(self) -> list[str]:
        """Return a digest of the live weights of every rank of every engine, engine by engine."""
        return self._refitter.fingerprints() if self._refitter is not None else []

    @override
    def close(self) -> None:
        """Leave the broadcast group, and release everything except the engines."""
        if self._refitter is not None:
            self._refitter.close()

    async def close_async(self) -> None:
        """`close` for asynchronous engines."""
        if self._refitter is not None:
            await self._refitter.close_async()

    def _opened(self, state_dict: StateDict) -> AbstractContextManager[StateDict]:
        """What rank 0 reads, while the other ranks take part in gathers.

        Raises:
            InvalidSourceError: Several ranks cannot read it together.
        """
        if self._group is None or isinstance(state_dict, Gathered):
            return nullcontext(state_dict)
        if not isinstance(state_dict, Mapping | list | tuple):
            raise InvalidSourceError(
                [f"{type(state_dict).__name__}: the ranks of a trainer push a mapping, or fp8refit.gathered of one"]
            )
        pairs: Mapping[str, Tensor] | Sequence[tuple[str, Tensor]] = state_dict
        config = self._config
        return Gathered(pairs, self._group, bucket_bytes=config.bucket_bytes, timeout_s=_PATIENCE * config.timeout_s)
