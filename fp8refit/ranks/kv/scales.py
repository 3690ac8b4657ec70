"""The scales of an FP8 KV cache, computed by a calibration pass or given by a trainer.

`scale = margin * amax / 448`, with amax the largest absolute value of the queries, keys or values of one attention
layer after RoPE, so that `x / scale` fits E4M3 (Micikevicius et al., FP8 Formats for Deep Learning, 2022). Never 0 or
NaN: a layer that saw only zeros, or no token, keeps its scale.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8refit.config import KvConfig, KvOrder
from fp8refit.errors import (
    CalibrationError,
    InvalidCalibrationError,
    InvalidSourceError,
    UnsupportedEngineError,
)
from fp8refit.kernels import Maxima
from fp8refit.live.names import kv_scale_names
from fp8refit.live.slots import KvCache, KvScale
from fp8refit.ranks.kv.calibration import to_float32, unfit_scales
from fp8refit.report import KvReport

E4M3_MAX = 448.0
MARGIN = 1.05
MARGIN_UNSATURATED = 2.0
MIN_SCALE = 2.0**-40
"""Smallest scale, so that its reciprocal is a normal number in any dtype that an engine divides in."""
KINDS = ("q", "k", "v")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The result of a calibration pass on one rank."""

    amax: dict[str, float]
    """Largest absolute value by scale name; 0 if nothing was seen."""
    num_passes: int
    seconds: float


def scale_of(amax: float, margin: float) -> float:
    """`margin * amax / 448` as a float32 number."""
    return to_float32(max(margin * amax / E4M3_MAX, MIN_SCALE))


class KvScales:
    """The KV scales of one rank.

    Args:
        cache: The engine's KV cache.
        device: The scales' device.
        torn: The last whole set by name, if it was partly overwritten.
    """

    def __init__(self, cache: KvCache, device: torch.device, *, torn: Mapping[str, float] | None = None) -> None:
        self._cache = cache
        self._device = device
        self.torn = torn
        self._scales: dict[str, KvScale] = {
            kv_scale_names(layer.name, scale.kind)[0]: scale for layer in cache.layers for scale in layer.scales
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The name that fp8refit uses for each scale: the first of `kv_scale_names`."""
        return tuple(self._scales)

    def check(self, order: KvOrder, config: KvConfig) -> None:
        """Check that an order can be carried out. Changes nothing.

        Raises:
            UnsupportedEngineError: The engine's scales cannot be changed or measured.
            InvalidCalibrationError: The order does not fit this engine.
        """
        self.check_writable()
        if order.token_ids:
            self._check_prefill(order.token_ids, config)
            if not any(scale.kind in config.scales for scale in self._scales.values()):
                raise UnsupportedEngineError(
                    f"this engine has no scale of {' or '.join(config.scales)} to measure; choose others (KvConfig.scales)"
                )
        unknown = sorted(set(order.scales) - self._names())
        if unknown:
            raise InvalidCalibrationError(
                f"kv_scales: this engine has no {', '.join(unknown)}; it has {', '.join(list(self._scales)[:3])} and so on"
            )
        problems = [f"{name}: {why}" for name, why in unfit_scales(order.scales)]
        for names in self._known_names():
            given = [name for name, _ in names if name in order.scales]
            if len({order.scales[name] for name in given}) > 1:
                problems.append(f"{' and '.join(given)} are the same scale, with different values")
        if problems:
            raise InvalidCalibrationError(f"kv_scales: {'; '.join(problems)}")

    def check_writable(self) -> None:
        """Check that scales can be changed.

        Raises:
            UnsupportedEngineError: They cannot be changed.
            EngineAsleepError: They cannot be changed now.
        """
        _refuse("the KV-cache scales of this engine cannot be changed:", self._cache.refusals)
        if not self._scales:
            raise UnsupportedEngineError("this engine has no FP8 KV cache whose scales could be changed")
        self._cache.check_now()

    def measure(self, order: KvOrder, config: KvConfig) -> Measured:
        """Run the calibration batch through the live network. Changes nothing.

        Raises:
            CalibrationError: NaN or Inf, or not enough memory.
        """
        prefill, start_s = self._cache.prefill, time.perf_counter()
        assert prefill is not None, "checked"
        maxima = Maxima(len(KINDS) * len(self._cache.layers), self._device)

        def observe(layer: int, q: Tensor | None, k: Tensor | None, v: Tensor | None) -> None:
            wanted = [x if kind in config.scales else None for kind, x in zip(KINDS, (q, k, v), strict=True)]
            maxima.update(len(KINDS) * layer, wanted)

        num_passes = 0
        try:
            with torch.inference_mode():
                for batch in _passes(order.token_ids, prefill.max_tokens):
                    sequences = [torch.tensor(ids, dtype=torch.int64, device=self._device) for ids in batch]
                    prefill(sequences, observe)
                    num_passes += 1
            seen = maxima.read()
        except torch.OutOfMemoryError as error:
            raise CalibrationError(
                f"no memory on {self._device} for a calibration pass ({error}); calibrate with shorter sequences, or leave the "
                "engine less memory"
            ) from error
        amax = {
            kv_scale_names(layer.name, scale.kind)[0]: seen[len(KINDS) * index + KINDS.index(scale.kind)]
            for index, layer in enumerate(self._cache.layers)
            for scale in layer.scales
        }
        bad = [name for name, value in amax.items() if not math.isfinite(value)]
        if bad:
            raise CalibrationError(
                f"NaN or Inf in the attention at {len(bad)} place(s), {', '.join(bad[:6])} first: the new policy, or a kernel "
                "of the engine, is broken"
            )
        return Measured(amax=amax, num_passes=num_passes, seconds=time.perf_counter() - start_s)

    def scales_for(self, amax: Mapping[str, float], config: KvConfig) -> dict[str, float]:
        """The scales for all values seen."""
        margin = config.margin
        if margin is None:
            margin = MARGIN if self._cache.saturates else MARGIN_UNSATURATED
        return {name: scale_of(amax[name], margin) for name in self._scales if amax.get(name, 0.0) > 0.0}

    def write(self, scales: Mapping[str, float]) -> dict[str, float]:
        """Write scales and the engine's copies of them. Returns what was written, by our names.

        Until the rank's commit the set counts as torn, since other ranks may not have written theirs.
        """
        canonical = {alias: name for names in self._known_names() for alias, name in names}
        values = {canonical[name]: to_float32(value) for name, value in scales.items() if name in canonical}
        if values:
            self._cache.before_write()
            if self.torn is None:
                self.torn = self._read()
            self._write(values)
        return values

    def heal(self) -> None:
        """Restore the last whole set after a failed attempt."""
        assert self.torn is not None, "torn"
        self._write(self.torn)

    def _read(self) -> dict[str, float]:
        """Every live scale."""
        live = torch.stack([scale.tensor.detach().view(()).to(self._device) for scale in self._scales.values()])
        return dict(zip(self._scales, live.tolist(), strict=True))

    def _write(self, values: Mapping[str, float]) -> None:
        """Write the device tensors with one upload and one launch, then the copies."""
        named = [(self._scales[name], value) for name, value in values.items() if name in self._scales]
        with torch.inference_mode():
            uploaded = torch.tensor([value for _, value in named], dtype=torch.float32, device=self._device)
            torch._foreach_copy_([scale.tensor.view(()) for scale, _ in named], list(uploaded.unbind()))
        for scale, value in named:
            scale.write_copies(value)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._cache.after_write()

    def kept(self, amax: Mapping[str, float], config: KvConfig) -> tuple[str, ...]:
        """Scales that were to be measured but saw nothing."""
        return tuple(
            name
            for name, scale in self._scales.items()
            if scale.kind in config.scales and not amax.get(name, 0.0) > 0.0
        )

    def _check_prefill(self, token_ids: Sequence[Sequence[int]], config: KvConfig) -> None:
        _refuse("the KV-cache scales of this engine cannot be measured, only given:", self._cache.prefill_refusals)
        prefill = self._cache.prefill
        if prefill is None:
            raise UnsupportedEngineError("this engine's KV-cache scales can be given (kv_scales=), but not measured")
        longest, highest = max(map(len, token_ids)), max(map(max, token_ids))
        if highest >= prefill.vocab_size:
            raise InvalidCalibrationError(
                f"calibration: token id {highest} is outside the vocabulary of {prefill.vocab_size}"
            )
        if longest > prefill.max_length:
            raise InvalidCalibrationError(
                f"calibration: a sequence has {longest} tokens, but the engine takes at most {prefill.max_length}"
            )

    def _names(self) -> set[str]:
        """All names of all scales that layers of this engine could have. Unused ones are ignored."""
        return {name for layer in self._cache.layers for kind in KINDS for name in kv_scale_names(layer.name, kind)}

    def _known_names(self) -> Iterator[list[tuple[str, str]]]:
        """All names of each scale that the engine has, with ours."""
        for layer in self._cache.layers:
            for scale in layer.scales:
                names = kv_scale_names(layer.name, scale.kind)
                yield [(name, names[0]) for name in names]


def _passes(token_ids: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[Sequence[int]]]:
    """Yield batches of whole sequences: at most `max_tokens` tokens, or one sequence."""
    batch: list[Sequence[int]] = []
    for ids in token_ids:
        if batch and sum(map(len, batch)) + len(ids) > max_tokens:
            yield batch
            batch = []
        batch.append(ids)
    if batch:
        yield batch


def refuse_unfit(found: Iterable[tuple[str, str]], *, written: bool = False) -> None:
    """Raise an error for invalid scales of a source, if there are any.

    Raises:
        InvalidSourceError: Names each, and why.
    """
    problems = [f"{name}: {why}" for name, why in found]
    if problems:
        raise InvalidSourceError(problems, written=written)


def _refuse(summary: str, refusals: Sequence[object]) -> None:
    if refusals:
        raise UnsupportedEngineError(summary, [str(refusal) for refusal in refusals])


def report_of(
    order: KvOrder | None,
    scales: Mapping[str, float],
    *,
    kept: Sequence[str] = (),
    num_passes: int = 0,
    seconds: float = 0.0,
) -> KvReport:
    """Make the report of written scales.

    Args:
        order: The order; None if the scales were sent with the weights.
        scales: The written scales, by our names.
        kept: Scales that were to be measured but saw nothing.
        num_passes: Number of prefills.
        seconds: Total time.
    """
    token_ids = order.token_ids if order is not None else ()
    given = order.scales if order is not None else {}
    return KvReport(
        origin="state_dict" if order is None else "calibration" if token_ids else "kv_scales",
        scales=dict(scales),
        kept=tuple(kept),
        ignored=tuple(name for name in given if not any(name in names for names in map(all_names, scales))),
        num_sequences=len(token_ids),
        num_tokens=sum(map(len, token_ids)),
        num_passes=num_passes,
        seconds=seconds,
    )


def all_names(name: str) -> tuple[str, ...]:
    """All names of the scale that we call `name`."""
    layer, _, leaf = name.rpartition(".")
    return kv_scale_names(layer, leaf.removesuffix("_scale"))
