"""Converts users' calibration batches and KV scales into what the ranks take."""

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import compress
from operator import index
from typing import Any, SupportsFloat, TypeAlias

import torch
from torch import Tensor

from fp8refit.config import KvConfig, KvOrder
from fp8refit.errors import InvalidCalibrationError
from fp8refit.live.names import strip_wrappers
from fp8refit.live.storage import why_unreadable

Calibration: TypeAlias = (
    Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor] | str | Sequence[str] | Mapping[str, Any]
)
"""Token ids: one or more sequences, as lists or an integer tensor (B, L); the output of a Hugging Face tokenizer, whose
`attention_mask` marks padding; or prompts, for an engine with a tokenizer."""

KvScaleValues: TypeAlias = Mapping[str, float | Tensor]
"""Scales by checkpoint name, such as `model.layers.0.self_attn.k_scale`: the factors that dequantize, `amax / 448`."""

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

Tokenize: TypeAlias = Callable[[Sequence[str]], Awaitable[list[list[int]]]]


async def order_of(
    calibration: Calibration | None, kv_scales: KvScaleValues | None, config: KvConfig, tokenize: Tokenize
) -> KvOrder | None:
    """Make the order for the ranks; None if nothing was given.

    Args:
        calibration: A batch to measure.
        kv_scales: Scales to set.
        config: How much of the batch to use.
        tokenize: The engine's tokenizer.

    Raises:
        InvalidCalibrationError: An argument is invalid, or both are given.
        UnsupportedEngineError: Prompts were given, but the engine has no tokenizer.
    """
    if calibration is not None and kv_scales is not None:
        raise InvalidCalibrationError("give a calibration batch or kv_scales, not both")
    if kv_scales is not None:
        scales = _scales(kv_scales)
        problems = [f"{name}: {why}" for name, why in unfit_scales(scales)]
        if problems:  # here, because JSON has no NaN
            raise InvalidCalibrationError(f"kv_scales: {'; '.join(problems)}")
        return KvOrder(scales=scales)
    if calibration is None:
        return None
    if isinstance(calibration, str):
        calibration = [calibration]
    if isinstance(calibration, Sequence) and calibration and all(isinstance(prompt, str) for prompt in calibration):
        calibration = await tokenize(calibration)  # type: ignore[arg-type]  # all of them are strings
    return KvOrder(token_ids=_cut(_sequences(calibration), config.max_tokens))


def to_float32(value: float) -> float:
    """`value`, rounded to float32."""
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


def unfit_scales(scales: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the names of invalid scales, and why."""
    for name, value in scales.items():
        if not (math.isfinite(to_float32(value)) and to_float32(value) > 0):
            yield name, f"is {value:g}; a KV-cache scale must be finite and positive"


def _sequences(batch: Any) -> list[list[int]]:
    """Every sequence of a batch.

    Raises:
        InvalidCalibrationError: It is empty, or holds anything but token ids.
    """
    mask = None
    if isinstance(batch, Mapping):
        if "input_ids" not in batch:
            raise InvalidCalibrationError(f"calibration: a mapping without input_ids ({', '.join(map(str, batch))})")
        batch, mask = batch["input_ids"], batch.get("attention_mask")
    if isinstance(batch, Tensor) and batch.dtype is torch.bool:
        raise InvalidCalibrationError(
            "calibration: a tensor of bools is a mask; pass the token ids, or both as input_ids and attention_mask"
        )
    rows = _rows(batch, _INTEGERS)
    if mask is not None:
        masks = _rows(mask, (*_INTEGERS, torch.bool), "attention_mask is ")
        if list(map(len, masks)) != list(map(len, rows)):
            raise InvalidCalibrationError("calibration: attention_mask has another shape than input_ids")
        try:
            rows = [list(compress(row, bits)) for row, bits in zip(rows, masks, strict=True)]
        except (RuntimeError, TypeError, ValueError) as error:
            raise InvalidCalibrationError(
                f"calibration: attention_mask holds values that are neither true nor false ({error})"
            ) from error
    for place, row in enumerate(rows):
        if not row:
            raise InvalidCalibrationError(f"calibration: sequence {place} holds no token")
        bad = [token for token in row if not _is_token_id(token)]
        if bad:
            raise InvalidCalibrationError(
                f"calibration: sequence {place} holds {bad[0]!r}, which is not a token id; pass lists or a tensor of integers"
            )
    if not rows:
        raise InvalidCalibrationError("calibration: it holds no sequence")
    return [[index(token) for token in row] for row in rows]


def _is_token_id(token: Any) -> bool:
    try:
        return not isinstance(token, bool) and index(token) >= 0
    except (TypeError, ValueError, RuntimeError):  # NumPy and torch raise the latter two for non-integers
        return False


def _rows(batch: Any, dtypes: Sequence[torch.dtype], what: str = "") -> list[list[Any]]:
    """A batch as lists."""
    if isinstance(batch, Tensor):
        _check_readable(batch, what)
    is_integer = not isinstance(batch, Tensor) or batch.dtype in dtypes
    if not is_integer or getattr(batch, "ndim", 1) not in (1, 2):
        wanted = "a mask is of integers or bools" if torch.bool in dtypes else "token ids are integers"
        raise InvalidCalibrationError(
            f"calibration: {what}a tensor of {batch.dtype} and shape {list(batch.shape)}; {wanted}, (L,) or (B, L)"
        )
    rows = _as_list(batch)
    if rows is None:
        raise InvalidCalibrationError(
            f"calibration: {what}{type(batch).__name__} is not a batch of token ids or prompts"
        )
    nested = [_as_list(row) for row in rows]
    if any(row is None for row in nested):
        return [rows]
    return [row for row in nested if row is not None]


def _as_list(value: Any) -> list[Any] | None:
    """A list, tuple, tensor or NumPy array with its elements; None for anything else."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    if isinstance(value, Tensor):
        _check_readable(value)
    found = value.tolist() if hasattr(value, "tolist") else None
    return found if isinstance(found, list) else None


def _check_readable(tensor: Tensor, what: str = "") -> None:
    """Check that a tensor has readable bytes.

    Raises:
        InvalidCalibrationError: It has none.
    """
    if problem := why_unreadable(tensor):
        raise InvalidCalibrationError(f"calibration: {what}a tensor that {problem}")


def _cut(rows: Sequence[Sequence[int]], max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Take whole sequences in order, up to `max_tokens`; the last one is cut short."""
    kept: list[tuple[int, ...]] = []
    for row in rows:
        if max_tokens <= 0:
            break
        kept.append(tuple(row[:max_tokens]))
        max_tokens -= len(kept[-1])
    return tuple(kept)


def _scales(given: Any) -> dict[str, float]:
    """Scales by checkpoint name.

    Raises:
        InvalidCalibrationError: There are none, or they are not a mapping of names to numbers.
    """
    if not isinstance(given, Mapping):
        raise InvalidCalibrationError(f"kv_scales: is a {type(given).__name__}; give a mapping of names to numbers")
    if not given:
        raise InvalidCalibrationError("kv_scales: it holds no scale")
    scales: dict[str, float] = {}
    for raw_name, value in given.items():
        try:
            name = strip_wrappers(raw_name)
        except (TypeError, UnicodeEncodeError):
            raise InvalidCalibrationError(f"kv_scales: has {raw_name!r} for a name; names must be strings") from None
        if name in scales:
            raise InvalidCalibrationError(f"kv_scales: {name} is given twice, the second time as {raw_name}")
        scales[name] = _number(raw_name, value)
    return scales


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor):
        if problem := why_unreadable(value):
            raise InvalidCalibrationError(f"kv_scales: {name} {problem}")
        if value.numel() != 1:
            raise InvalidCalibrationError(
                f"kv_scales: {name} has shape {list(value.shape)}; a KV-cache scale is a single number"
            )
    if isinstance(value, bool | str) or not isinstance(value, SupportsFloat):
        raise InvalidCalibrationError(f"kv_scales: {name} is {value!r}; give a number")
    try:
        return float(value)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidCalibrationError(f"kv_scales: {name} is not a number ({error})") from error
