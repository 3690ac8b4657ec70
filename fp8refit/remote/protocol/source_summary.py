"""What a driver finds out about a source before sending it to ranks that do not read it themselves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError, NonFiniteError
from fp8refit.fill.tasks import scale_problem
from fp8refit.kernels import fits_scale_format
from fp8refit.live.formats import ScaleFormat
from fp8refit.live.names import is_kv_scale
from fp8refit.live.slots import FP8_DTYPE, SCALE_SUFFIX, SOURCE_DTYPES, TensorMeta
from fp8refit.ranks.kv.calibration import unfit_scales
from fp8refit.sources.row_runs import in_pieces
from fp8refit.sources.source import RandomAccess, Source, check_can_be_read_twice
from fp8refit.transport.memory.segment import unsendable


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSummary:
    """What will come, and what is wrong with it as far as the driver can tell."""

    metadata: Mapping[str, TensorMeta]
    problems: Sequence[str] = ()
    odd_scales: tuple[str, ...] = ()
    """Names of scale tensors with values that are not powers of two."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Names of invalid KV scales, and why."""

    def depends_on_values(self, config: RefitConfig) -> bool:
        """Whether the summary also depends on values, not just on names, shapes and dtypes."""
        return config.validate_values == "strict" or any(
            meta.dtype is FP8_DTYPE or is_kv_scale(name) for name, meta in self.metadata.items()
        )


def summarize(source: Source, config: RefitConfig) -> SourceSummary | None:
    """Check a source; None if nothing is known before it is read.

    Raises:
        NonFiniteError: NaN or Inf, with `validate="strict"`.
        InvalidSourceError: `validate="strict"` needs to read a source twice that can be read only once.
    """
    scanned = source.scan()
    metadata, problems = scanned if scanned is not None else ({}, ())
    odd = unsendable(metadata)
    if odd:
        metadata = {name: meta for name, meta in metadata.items() if name not in odd}
        problems = (*problems, *odd.values())
    if config.validate_values == "strict" and not problems:
        _look_for_bad_values(source, config)
    if scanned is None:
        return None
    odd_scales: list[str] = []
    may_refuse = source.is_repeatable and config.on_scale_mismatch == "refuse"
    if may_refuse and any(meta.dtype is FP8_DTYPE for meta in metadata.values()):
        odd_scales = sorted({name for name, scale in _scales(source, metadata, config) if _is_odd(scale)})
    unfit: dict[str, str] = {}
    if isinstance(source, RandomAccess):
        scales = source.pick(
            name
            for name, meta in metadata.items()
            if is_kv_scale(name) and meta.shape in ((), (1,)) and meta.dtype in SOURCE_DTYPES
        )
        unfit = dict(unfit_scales({name: float(scale) for name, scale in scales.items()}))
    return SourceSummary(metadata=metadata, problems=tuple(problems), odd_scales=tuple(odd_scales), unfit=unfit)


def _scales(source: Source, metadata: Mapping[str, TensorMeta], config: RefitConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the scales of FP8 tensors, or rows of them, without reading other tensors where that is possible."""
    if isinstance(source, RandomAccess):
        yield from source.pick(name for name in metadata if name.endswith(SCALE_SUFFIX)).items()
        return
    for piece in in_pieces(source, config.bucket_bytes):
        if piece.name.endswith(SCALE_SUFFIX):
            yield piece.name, piece.tensor


def _look_for_bad_values(source: Source, config: RefitConfig) -> None:
    """Read everything without writing.

    Raises:
        NonFiniteError: NaN or Inf.
        InvalidSourceError: The source can be read only once, or holds invalid scales.
    """
    check_can_be_read_twice(source)
    pieces = in_pieces(source, config.bucket_bytes)
    names = sorted({piece.name for piece in pieces if _has_bad_value(piece.name, piece.tensor, config)})
    if names and all(name.endswith(SCALE_SUFFIX) for name in names):
        raise InvalidSourceError([scale_problem(name, ScaleFormat.FP32) for name in names])
    if names:
        raise NonFiniteError(names, written=False)


def _has_bad_value(name: str, tensor: Tensor, config: RefitConfig) -> bool:
    if name.endswith(SCALE_SUFFIX):
        return not bool(fits_scale_format(tensor.to(torch.float32), ScaleFormat.FP32).all())
    if tensor.dtype is FP8_DTYPE:
        return bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any())
    if tensor.dtype is torch.float32 and config.fp32_sources == "round_to_bf16":
        tensor = tensor.to(torch.bfloat16)
    return bool(~torch.isfinite(tensor).all())


def _is_odd(scale: Tensor) -> bool:
    """Whether any scale is not a power of two."""
    return not bool(fits_scale_format(scale.to(torch.float32), ScaleFormat.UE8M0).all())
