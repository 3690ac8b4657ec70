"""What users call: `Refitter` and `refit`. The steps of a refit are in `fp8refit.driver.attempt`."""

from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.driver.attach import attach_engine
from fp8refit.driver.attempt import take_turn
from fp8refit.driver.engine import Engine
from fp8refit.driver.synchronous import Closing, run
from fp8refit.errors import (
    RefitError,
    UnsupportedEngineError,
)
from fp8refit.live.layout import EngineLayout
from fp8refit.ranks.kv.calibration import Calibration, KvScaleValues
from fp8refit.report import KvReport, RefitReport, VerifyReport
from fp8refit.sources.sharded.gather import opened
from fp8refit.sources.source import Manifest, StateDict, as_source

T = TypeVar("T")


def choose_config(config: RefitConfig | None, options: Mapping[str, Any]) -> RefitConfig:
    """The config that was given, or one of its fields.

    Raises:
        TypeError: It is no config.
        ValueError: Both were given, or a field is none or has a wrong value.
    """
    if config is None:
        return RefitConfig(**options)
    if not isinstance(config, RefitConfig):
        raise TypeError(f"config is of type {type(config).__name__}; pass a RefitConfig, or its fields as keywords")
    if options:
        raise ValueError(f"give config or its fields as keywords, not both (got {sorted(options)} too)")
    return config


class Refitter(Closing):
    """Moves one live engine from policy to policy.

    Args:
        engine: A `vllm.LLM` or `AsyncLLM`, an `sglang.Engine`, a transformers model made block FP8 by
            `fp8refit_transformers.to_block_fp8`, or a running vLLM or SGLang server: its URL, or a `VllmServer` or
            `SglangServer` of the adapters.
        config: How to refit; or give its fields as keywords.

    Raises:
        UnsupportedEngineError: No installed adapter takes the engine, or it cannot be refitted; says what to set.
        EngineLostError: Nobody answers at the URL.

    Examples:
        >>> refitter = Refitter(llm)                            # doctest: +SKIP
        >>> report = refitter.refit(model.state_dict())         # doctest: +SKIP
        >>> print(report)                                       # doctest: +SKIP
    """

    def __init__(self, engine: object, config: RefitConfig | None = None, **options: Any) -> None:
        self._config = choose_config(config, options)
        self._attached = attach_engine(engine)
        self._engine = self._attached.engine

    @property
    def config(self) -> RefitConfig:
        """How it refits."""
        return self._config

    @property
    def engine(self) -> Engine:
        """The adapter on the engine."""
        return self._engine

    @property
    def version(self) -> int:
        """Policy version the engine serves; 0 is what it was booted with."""
        return self._engine.ranks.version

    @property
    def is_dirty(self) -> bool:
        """Whether the engine holds a mixture of two policies, and so refuses requests until the next complete refit."""
        return self._engine.ranks.is_dirty

    def refit(
        self,
        state_dict: StateDict,
        *,
        manifest: Manifest | None = None,
        calibration: Calibration | None = None,
        kv_scales: KvScaleValues | None = None,
    ) -> RefitReport:
        """Make the engine serve the policy in `state_dict`: wholly, or with an error and not at all.

        An error before the first byte is written leaves the engine as it was, serving. An error after it leaves the
        engine dirty: it refuses requests at admission until a later `refit` succeeds.

        If the engine has one driver per rank (vLLM's `external_launcher`), each of them calls this with the same policy, and
        all of them return or raise the same. So does every rank of a trainer whose state dict holds DTensors, which are
        gathered bucket by bucket. If some of those ranks have no engine, see `fp8refit.gathered`.

        Args:
            state_dict: Checkpoint names to tensors, bfloat16, float16, float32 or already block FP8, on any device, in
                any order: a mapping, a list or iterator of pairs, a function returning a fresh iterator, or the path of a
                safetensors file or folder. Wrappers' prefixes (FSDP, torch.compile, DDP, PEFT) are stripped. The source
                must keep its bytes until this returns, and a stream's CUDA tensors must be ready on the caller's current
                stream. A function is called once for each pass: for names and shapes, unless a `manifest` says them; for
                scales, if FP8 comes to slots that want powers of two; for values, with `validate="strict"`; and to write.
            manifest: For iterators and functions: name to (shape, dtype) of all that will come. Without one, an iterator
                that can be read only once is judged while it is written.
            calibration: For an engine with an FP8 KV cache: token ids (lists, or integers (B, L)) or prompts, run once through
                the new policy to set the scales of the cache; `RefitConfig.kv` says how. Requests do not see it. Without it
                scales stay, unless `kv_scales` or the state dict bring them (`model.layers.0.self_attn.k_scale`).
            kv_scales: Such scales by their names, instead.

        Returns:
            What was done and how long each phase took.

        Raises:
            InvalidSourceError: Names, shapes, dtypes or scales do not fit; names every problem at once.
            NonFiniteError: NaN or Inf; names the tensors.
            InvalidCalibrationError: The calibration batch, or KV scales, do not fit.
            CalibrationError: The calibration pass met NaN or Inf, or no memory; the engine is dirty.
            EngineBusyError: Requests are unfinished, or another refit is under way.
            EngineAsleepError: The weights sleep.
            UnsupportedEngineError: The engine has layers that cannot be refitted, or KV scales that cannot be set.
            StagingMemoryError: No room for the buckets of a source that is not on the engine's device.
            CacheFlushError: The old policy's KV cache would stay; nothing was written.
            TransportError: The tensors cannot be reached from the processes of the engine.
            RankFailedError: A rank failed in a way that was not foreseen.
            EngineLostError: A CUDA fault, or a rank that died or does not answer; restart the engine.
        """
        return self._run(self.refit_async(state_dict, manifest=manifest, calibration=calibration, kv_scales=kv_scales))

    async def refit_async(
        self,
        state_dict: StateDict,
        *,
        manifest: Manifest | None = None,
        calibration: Calibration | None = None,
        kv_scales: KvScaleValues | None = None,
    ) -> RefitReport:
        """`refit` for an asynchronous engine, awaited in the event loop that drives the engine.

        `RefitConfig.in_flight` says what becomes of requests that run; those that arrive meanwhile wait. If the refit fails
        part way, both end: the former with what they have, the latter with `EngineDirtyError`. Reading the state dict takes
        place in the event loop. A synchronous engine blocks the loop until it is done.
        """
        config = self._config
        with opened(state_dict, bucket_bytes=config.bucket_bytes, timeout_s=config.timeout_s) as whole:
            return await take_turn(
                self._attached,
                lambda attempt: attempt.refit(
                    whole, config, manifest=manifest, calibration=calibration, kv_scales=kv_scales
                ),
            )

    def calibrate(self, calibration: Calibration) -> KvReport:
        """Set the scales of the engine's FP8 KV cache for the policy that it serves, all of them or none.

        What `refit(..., calibration=...)` does after the weights, alone: for an engine whose memory wakes up step by step, or
        for a batch that is known later.

        Args:
            calibration: Token ids or prompts; see `refit`.

        Returns:
            Which scales were written.

        Raises:
            InvalidCalibrationError: The batch does not fit the engine.
            UnsupportedEngineError: The engine has no FP8 KV cache, or one whose scales cannot be set; says what to set.
            CalibrationError: The pass met NaN or Inf, or no memory; nothing was written.
            EngineDirtyError: The engine serves no whole policy; refit it.
            EngineBusyError: Requests are unfinished, or a refit is under way.
            EngineAsleepError: The weights sleep. The KV cache may.
            CacheFlushError: KV under the old scales would stay; nothing was written.
            EngineLostError: A CUDA fault, or a rank that died or does not answer; restart the engine.
        """
        return self._run(self.calibrate_async(calibration))

    async def calibrate_async(self, calibration: Calibration) -> KvReport:
        """`calibrate` for an asynchronous engine, awaited in the event loop that drives the engine."""
        return await take_turn(self._attached, lambda attempt: attempt.calibrate(calibration, self._config))

    def verify(self, state_dict: StateDict, *, manifest: Manifest | None = None) -> VerifyReport:
        """Compare what the engine holds, on every rank, with what a refit to this policy would write. Changes nothing.

        Proof that trainer and engine are in sync: every weight and scale, bit for bit. Requests may run meanwhile. What the
        engine derives from weights, and what `RefitConfig.keep` names and does not come, is not looked at.

        Args:
            state_dict: See `refit`.
            manifest: See `refit`.

        Returns:
            Which tensors differ, on which ranks.

        Raises:
            RefitError: See `refit`. The engine serves what it served.
        """
        return self._run(self.verify_async(state_dict, manifest=manifest))

    async def verify_async(self, state_dict: StateDict, *, manifest: Manifest | None = None) -> VerifyReport:
        """`verify` for an asynchronous engine, awaited in the event loop that drives the engine."""
        config, ranks = self._config, self._engine.ranks
        with opened(state_dict, bucket_bytes=config.bucket_bytes, timeout_s=config.timeout_s) as whole:
            reports = await take_turn(
                self._attached, lambda _: ranks.verify(lambda: as_source(whole, manifest=manifest), config)
            )
        return VerifyReport.of(reports, version=ranks.version)

    def layout(self) -> EngineLayout:
        """Slots, kernels, scale formats and refusals of the engine."""
        return self._run(self.layout_async())

    async def layout_async(self) -> EngineLayout:
        """`layout` for an asynchronous engine."""
        return await self._engine.ranks.layout()

    def fingerprints(self) -> list[str]:
        """A digest of the weights that each rank holds, in order of rank: equal if every byte is, up to chance.

        For comparing replicas, or an engine after a refit with one booted from a checkpoint of the same policy: engines of one
        kind, version and number of ranks. Reads every weight once, where it lies, at a good part of memory speed.

        Raises:
            EngineAsleepError: The weights sleep.
            EngineLostError: A CUDA fault, or a rank that died or does not answer.
        """
        return self._run(self.fingerprints_async())

    async def fingerprints_async(self) -> list[str]:
        """`fingerprints` for an asynchronous engine."""
        return list(await self._engine.ranks.fingerprints())

    @override
    def close(self) -> None:
        """Give back what is held beyond the engine: plan, table, and mappings of the trainer's memory in other processes.

        Version and state stay; a later refit compiles again.

        Raises:
            EngineBusyError: A refit is under way.
        """
        self._run(self.close_async())

    async def close_async(self) -> None:
        """`close` for an asynchronous engine."""
        await take_turn(self._attached, lambda _: self._engine.ranks.close())

    def _run(self, steps: Coroutine[Any, Any, T]) -> T:
        """Run the steps of a synchronous engine, which never suspend.

        Raises:
            UnsupportedEngineError: The engine is asynchronous.
        """
        if self._engine.is_asynchronous:
            steps.close()
            raise UnsupportedEngineError(
                f"this {self._engine.name} engine is asynchronous; call refit_async, calibrate_async, layout_async and "
                "close_async, and await them in the event loop that drives it"
            )
        return run(steps, engine=self._engine.name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close_async()
        except RefitError:
            if error is None:
                raise


def refit(
    engine: object,
    state_dict: StateDict,
    *,
    manifest: Manifest | None = None,
    calibration: Calibration | None = None,
    kv_scales: KvScaleValues | None = None,
    **options: Any,
) -> RefitReport:
    """`Refitter(engine, **options).refit(state_dict)` in one line; the engine keeps its plan between calls."""
    refitter = Refitter(engine, **options)
    return refitter.refit(state_dict, manifest=manifest, calibration=calibration, kv_scales=kv_scales)
