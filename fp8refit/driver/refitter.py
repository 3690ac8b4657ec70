"""The public `Refitter` and `refit`. The steps of a refit are in `fp8refit.driver.attempt`."""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Never, Self, TypeVar, Unpack

from typing_extensions import override

from fp8refit.config import Options, RefitConfig, choose_config, refuse_others
from fp8refit.driver.attach import attach_engine
from fp8refit.driver.attempt import Attempt, take_turn, warn_of_idle
from fp8refit.driver.closing import Closing
from fp8refit.driver.engine import Engine
from fp8refit.errors import RefitError, UnsupportedEngineError
from fp8refit.fill.plan import is_any_of
from fp8refit.live.layout import EngineLayout
from fp8refit.ranks.kv.calibration import Calibration, KvScaleValues
from fp8refit.report import KvReport, RefitReport, VerifyReport
from fp8refit.sources.lora import adapter_named, matrices_of, names_of_adapter
from fp8refit.sources.renamed import Names, also_as_sent
from fp8refit.sources.sharded.gather import opened
from fp8refit.sources.source import Manifest, StateDict
from fp8refit.transport.running import run

T = TypeVar("T")


class Refitter(Closing):
    """Moves one live engine from policy to policy.

    Args:
        engine: A `vllm.LLM` or `AsyncLLM`, an `sglang.Engine`, a transformers model made block FP8 by
            `fp8refit_transformers.to_block_fp8`, or a running vLLM or SGLang server: its URL, or a `VllmServer` or
            `SglangServer` of the adapters.
        config: Options; or pass its fields as keywords.
        on_refit: Called with each report once the engine serves the new policy. What it raises reaches the caller.
        **options: `validate`, `fp32_sources`, `on_scale_mismatch`, `keep`, `ignore`, `rename`, `prove_trace`, `bucket_bytes`,
            `transport`, `collective`, `in_flight`, `count_changes`, `kv` and `timeout_s`; see `RefitConfig`.

    Raises:
            InvalidOptionError: An option is unknown or invalid.
            UnsupportedEngineError: No installed adapter accepts the engine, or it cannot be refitted; says what to set.
            EngineLostError: No server answers at the URL.

    Examples:
        >>> refitter = Refitter(llm)                            # doctest: +SKIP
        >>> report = refitter.refit(model.state_dict())         # doctest: +SKIP
        >>> print(report)                                       # doctest: +SKIP
    """

    def __init__(
        self,
        engine: object,
        config: RefitConfig | None = None,
        *,
        on_refit: Callable[[RefitReport], object] = lambda _: None,
        **options: Unpack[Options],
    ) -> None:
        self._on_refit = on_refit
        self._config = choose_config(config, options)
        self._names = Names.of(self._config.rename)
        self._attached = attach_engine(engine)
        self._engine = self._attached.engine

    @property
    def config(self) -> RefitConfig:
        """The options."""
        return self._config

    @property
    def names(self) -> Names | None:
        """The engine's names for those of the trainer; None if they are the same."""
        return self._names

    @property
    def engine(self) -> Engine:
        """The adapter on the engine."""
        return self._engine

    @property
    def version(self) -> int:
        """The policy version that the engine serves; 0 is what it was booted with."""
        return self._engine.ranks.version

    @property
    def is_dirty(self) -> bool:
        """Whether the engine holds a mixture of two policies and refuses requests until the next complete refit."""
        return self._engine.ranks.is_dirty

    def refit(
        self,
        state_dict: StateDict,
        *,
        manifest: Manifest | None = None,
        calibration: Calibration | None = None,
        kv_scales: KvScaleValues | None = None,
        **_others: Never,
    ) -> RefitReport:
        """Make the engine serve the policy in `state_dict`, all or nothing.

        An error before the first byte is written leaves the engine serving as before; an iterator may then have been read in
        part. A later error leaves the engine dirty: it refuses requests until a `refit` succeeds.

        If the engine has one driver per rank (vLLM's `external_launcher`), each driver calls this with the same policy,
        and all return or raise the same. The same holds for the ranks of a trainer whose state dict has DTensors, which
        are gathered in buckets. If some of those ranks have no engine, see `fp8refit.gathered`.

        Args:
            state_dict: Checkpoint names to tensors, bfloat16, float16, float32 or already block FP8, on any device, in
                any order: a mapping, a list or iterator of pairs, a function returning a fresh iterator, or the path of
                a safetensors file or folder. Wrappers' prefixes (FSDP, torch.compile, DDP, PEFT) are stripped. The
                source must keep its bytes until this returns, and a stream's CUDA tensors must be ready on the caller's
                current stream. A function is called once per pass: for names and shapes, unless there is a `manifest`;
                for scales, if FP8 tensors go to slots that need powers of two; for values, with `validate="strict"`;
                and to write.
            manifest: For iterators and functions: name to (shape, dtype) of every tensor. Without it, an iterator that
                can be read only once is checked while it is written.
            calibration: For an engine with an FP8 KV cache: token ids (lists, or integers (B, L)) or prompts, run once
                through the new policy to compute the cache's scales; see `RefitConfig.kv`. Invisible to requests.
                Without it, scales stay unless `kv_scales` or the state dict sets them
                (`model.layers.0.self_attn.k_scale`).
            kv_scales: Instead of a calibration batch: scales by name.

        Returns:
                What was done, and how long each phase took.

        Raises:
            InvalidOptionError: An option was passed here, not to the `Refitter`.
            InvalidSourceError: Names, shapes, dtypes or scales do not fit; lists every problem.
            NonFiniteError: NaN or Inf; names the tensors.
            InvalidCalibrationError: The calibration batch, or KV scales, do not fit.
            CalibrationError: The calibration pass met NaN or Inf, or ran out of memory; the engine is dirty.
            EngineBusyError: Requests are unfinished, or another refit is running.
            EngineAsleepError: The weights are asleep.
            UnsupportedEngineError: The engine has layers that cannot be refitted, or KV scales that cannot be set.
            StagingMemoryError: There is no room for the buckets of a source that is not on the engine's device.
            CacheFlushError: The engine kept the old policy's KV cache; nothing was written.
            TransportError: The engine's processes cannot reach the tensors.
            RankFailedError: A rank failed in an unforeseen way.
            EngineLostError: A CUDA fault, or a rank that died or does not answer; restart the engine.
        """
        return self._run(
            self.refit_async(state_dict, manifest=manifest, calibration=calibration, kv_scales=kv_scales, **_others)
        )

    async def refit_async(
        self,
        state_dict: StateDict,
        *,
        manifest: Manifest | None = None,
        calibration: Calibration | None = None,
        kv_scales: KvScaleValues | None = None,
        **_others: Never,
    ) -> RefitReport:
        """`refit` for an asynchronous engine, awaited in the event loop that drives the engine.

        `RefitConfig.in_flight` decides what happens to running requests; new ones wait. If the refit fails part way,
        running requests end with the tokens they have, and waiting ones with `EngineDirtyError`. The state dict is read
        in the event loop. A synchronous engine blocks the loop until it is done.
        """
        refuse_others(self.refit_async, _others)
        config = self._config
        with self._opened(state_dict) as whole:
            report = await take_turn(
                self._attached,
                lambda attempt: attempt.refit(
                    whole, config, self._names, manifest=manifest, calibration=calibration, kv_scales=kv_scales
                ),
            )
        warn_of_idle(config, self._names, report, self._attached.idle)
        self._on_refit(report)
        return report

    def refit_adapter(self, name: str, state_dict: StateDict, lora_config: Any = None, **_others: Never) -> RefitReport:
        """Make the engine serve new matrices of a LoRA adapter that it has loaded, all or nothing, as `refit` does for weights.

        Base weights and other adapters stay. The matrices go where the engine's kernels read them, and into its copy in host
        memory, from which it loads the adapter again. Versions, `in_flight` and dropped caches are those of `refit`. Values
        are looked at before the first byte is written, unless `validate="off"`.

        Args:
            name: The adapter's name in requests (vLLM's `LoRARequest.lora_name`, SGLang's `lora_path`). It must have been used
                or added before.
            state_dict: Every matrix of the adapter and nothing else, as `refit` takes tensors: `lora_A` (rank, inputs) and
                `lora_B` (outputs, rank) under PEFT's names, such as those of `peft.get_peft_model_state_dict(model)` or of
                an `adapter_model.safetensors`; with the adapter's name in them or without. Its rank stays.
            lora_config: PEFT's `LoraConfig`, or what `adapter_config.json` holds, of which `lora_alpha`, `use_rslora` and
                `alpha_pattern` say by what `lora_B` is multiplied. Default: by what it was when the engine loaded the
                adapter.

        Returns:
            What was done, and how long each phase took.

        Raises:
            InvalidOptionError: An option was passed here, or `lora_config` has no `lora_alpha`.
            InvalidSourceError: Matrices are missing, unknown, or of another shape; lists every one. Or a refit of weights
                that failed has left others incomplete: refit those first.
            NonFiniteError: NaN or Inf; names the matrices.
            UnsupportedEngineError: The engine has no such adapter, or one that cannot be refitted; says what to do.
            RefitError: See `refit`.

        Examples:
            >>> refitter.refit_adapter("policy", get_peft_model_state_dict(model))      # doctest: +SKIP
        """
        return self._run(self.refit_adapter_async(name, state_dict, lora_config, **_others))

    async def refit_adapter_async(
        self, name: str, state_dict: StateDict, lora_config: Any = None, **_others: Never
    ) -> RefitReport:
        """`refit_adapter` for an asynchronous engine, awaited in the event loop that drives the engine. See `refit_async`."""
        refuse_others(self.refit_adapter_async, _others)
        own, names = self._config, names_of_adapter(name, self._names)
        options = own.model_copy(
            update={"keep": ("*",), "validate_values": "off" if own.validate_values == "off" else "strict"}
        )

        async def steps(attempt: Attempt) -> RefitReport:
            adapter = adapter_named(name, await self.layout_async())
            is_ignored = is_any_of(own.ignore)
            adapted = partial(matrices_of, name=name, adapter=adapter, lora_config=lora_config, is_ignored=is_ignored)
            return await attempt.refit(
                whole, options, names, manifest=None, calibration=None, kv_scales=None, adapted=adapted
            )

        with also_as_sent(names), self._opened(state_dict) as whole:
            report = await take_turn(self._attached, steps)
        self._on_refit(report)
        return report

    def calibrate(self, calibration: Calibration, **_others: Never) -> KvReport:
        """Set the scales of the engine's FP8 KV cache for the served policy, all or none.

        Does only what `refit(..., calibration=...)` does after the weights: for an engine whose memory wakes up step by
        step, or for a batch that is known later.

        Args:
            calibration: Token ids or prompts; see `refit`.

        Returns:
            The scales that were written.

        Raises:
            InvalidCalibrationError: The batch does not fit the engine.
            UnsupportedEngineError: The engine has no FP8 KV cache, or one whose scales cannot be set; says what to set.
            CalibrationError: The pass met NaN or Inf, or ran out of memory; nothing was written.
            EngineDirtyError: The weights of the engine are incomplete; refit it.
            EngineBusyError: Requests are unfinished, or a refit is running.
            EngineAsleepError: The weights are asleep. The KV cache may be.
            CacheFlushError: The engine kept KV with the old scales; nothing was written.
            EngineLostError: A CUDA fault, or a rank that died or does not answer; restart the engine.
        """
        return self._run(self.calibrate_async(calibration, **_others))

    async def calibrate_async(self, calibration: Calibration, **_others: Never) -> KvReport:
        """`calibrate` for an asynchronous engine, awaited in the event loop that drives the engine."""
        refuse_others(self.calibrate_async, _others)
        return await take_turn(self._attached, lambda attempt: attempt.calibrate(calibration, self._config))

    def verify(self, state_dict: StateDict, *, manifest: Manifest | None = None, **_others: Never) -> VerifyReport:
        """Compare what the engine holds, on every rank, with what a refit to this policy would write. Changes nothing.

        It proves that trainer and engine are in sync: every weight and scale is compared bit for bit. Requests may run
        in the meantime. Not compared: what the engine derives from weights, and missing tensors that match
        `RefitConfig.keep`.

        Args:
            state_dict: See `refit`.
            manifest: See `refit`.

        Returns:
            Which tensors differ, on which ranks, and whether the engine is dirty.

        Raises:
            RefitError: See `refit`. The engine is unchanged.
        """
        return self._run(self.verify_async(state_dict, manifest=manifest, **_others))

    async def verify_async(
        self, state_dict: StateDict, *, manifest: Manifest | None = None, **_others: Never
    ) -> VerifyReport:
        """`verify` for an asynchronous engine, awaited in the event loop that drives the engine."""
        refuse_others(self.verify_async, _others)
        config, names = self._config, self._names
        with self._opened(state_dict) as whole:
            return await take_turn(
                self._attached, lambda attempt: attempt.verify(whole, config, names, manifest=manifest)
            )

    def layout(self) -> EngineLayout:
        """Slots, kernels, scale formats and refusals of the engine."""
        return self._run(self.layout_async())

    async def layout_async(self) -> EngineLayout:
        """`layout` for an asynchronous engine."""
        return await self._engine.ranks.layout()

    def fingerprints(self) -> list[str]:
        """Return a digest of each rank's weights, in rank order. Equal weights give equal digests.

        Use it to compare replicas, or a refitted engine with one booted from a checkpoint of the same policy. The
        engines must have the same kind, version and number of ranks. Reads every weight once, on its device, close to
        memory speed.

        Raises:
            EngineAsleepError: The weights are asleep.
            EngineLostError: A CUDA fault, or a rank that died or does not answer.
        """
        return self._run(self.fingerprints_async())

    async def fingerprints_async(self) -> list[str]:
        """`fingerprints` for an asynchronous engine."""
        return list(await self._engine.ranks.fingerprints())

    @override
    def close(self) -> None:
        """Release plan, table, and mappings of the trainer's memory in other processes.

        Version and state stay. A later refit compiles again.

        Raises:
            EngineBusyError: A refit is running.
        """
        self._run(self.close_async())

    async def close_async(self) -> None:
        """`close` for an asynchronous engine."""
        await take_turn(self._attached, lambda _: self._engine.ranks.close())

    @contextmanager
    def _opened(self, state_dict: StateDict) -> Iterator[StateDict]:
        """What is read; and errors speak of the trainer's names too."""
        config = self._config
        with (
            also_as_sent(self._names),
            opened(state_dict, bucket_bytes=config.bucket_bytes, timeout_s=config.timeout_s) as whole,
        ):
            yield whole

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
    **options: Unpack[Options],
) -> RefitReport:
    """`Refitter(engine, **options).refit(state_dict)` in one line; the engine keeps its plan between calls."""
    refitter = Refitter(engine, **options)
    return refitter.refit(state_dict, manifest=manifest, calibration=calibration, kv_scales=kv_scales)
