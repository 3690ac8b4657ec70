"""Weights that a trainer holds as block FP8 itself. An engine takes their codes and scales bit for bit."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp8refit.errors import PrecisionError
from fp8refit.kernels import fits_scale_format
from fp8refit.live.formats import BlockFormat
from fp8refit.live.layout import EngineLayout
from fp8refit.live.names import strip_wrappers
from fp8refit.live.slots import FP8_DTYPE, SCALE_SUFFIX, dtype_name
from fp8refit.training.precision.formats import formats_of

TE_BLOCK = 128


def block_scaled(
    state_dict: Mapping[str, Any], *, like: EngineLayout, masters: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Split the block-scaled parameters of a state dict into codes and scales for `refit`, so that nothing is rounded
    twice.

    Supports torchao's `Float8Tensor` and Transformer Engine's `Float8BlockwiseQTensor` (with `Float8BlockScaling`, whose
    scales are powers of two unless `NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1`). Everything else passes unchanged.

    Args:
        state_dict: Checkpoint names to tensors.
        like: The engine's layout, from `refitter.layout()`.
        masters: Unquantized weights by name. They replace FP8 weights that do not fit the engine, and the refit quantizes
            them.

    Returns:
        Checkpoint names and plain tensors: codes, `..._scale_inv`, and the rest.

    Raises:
        PrecisionError: FP8 parameters do not fit the engine's blocks or scales and have no master; names each.

    Examples:
        >>> refitter.refit(block_scaled(model.state_dict(), like=refitter.layout()))     # doctest: +SKIP
    """
    formats, masters = formats_of(like), {strip_wrappers(name): tensor for name, tensor in (masters or {}).items()}
    tensors: dict[str, Tensor] = {}
    problems = []
    for raw_name, value in state_dict.items():
        name = strip_wrappers(raw_name)
        if not _is_block_scaled(value):
            tensors[name] = value
            continue
        problem, parts = _parts(value, formats.get(like.aliases.get(name, name)))
        if problem is None and parts is not None:
            tensors[name], tensors[name + SCALE_SUFFIX] = parts
        elif name in masters:
            tensors[name] = masters[name]
        else:
            problems.append(f"{name}: {problem}; pass its master weight in masters= to have that quantized")
    if problems:
        raise PrecisionError(problems)
    return tensors


def _is_block_scaled(value: Any) -> bool:
    return all(hasattr(value, field) for field in ("qdata", "scale")) or hasattr(value, "_rowwise_scale_inv")


def _parts(value: Any, wanted: BlockFormat | None) -> tuple[str | None, tuple[Tensor, Tensor] | None]:
    """Return why a parameter does not fit, or its codes and scales."""
    if wanted is None:
        return "is FP8, but this engine does not hold it as block FP8", None
    if hasattr(value, "qdata"):
        codes, scale = value.qdata, value.scale
    else:
        codes, scale = value._rowwise_data, value._rowwise_scale_inv
        if codes is None or not value._is_2D_scaled:
            return "holds no codes in blocks of 128x128 rows and columns", None
        if not str(value._fp8_dtype).endswith("E4M3"):
            return f"holds {value._fp8_dtype}; this engine holds E4M3", None
        codes, scale = (
            codes.view(FP8_DTYPE),
            scale[:, : -(-codes.shape[-1] // TE_BLOCK)],
        )  # TE pads them for its products
    if (codes.dtype, scale.dtype) != (wanted.codes.dtype, wanted.scale_format.dtype):
        return (
            f"holds {dtype_name(codes.dtype)} with {dtype_name(scale.dtype)} scales; this engine holds E4M3 with float32",
            None,
        )
    if tuple(scale.shape) != (expected := wanted.scale_shape(codes.shape)):
        return f"has scales {list(scale.shape)}, but blocks of {wanted.block} need {list(expected)}", None
    if not bool(fits_scale_format(scale, wanted.scale_format).all()):
        return f"has scales that are not all {wanted.scale_format}, which this engine's kernel needs", None
    return None, (codes, scale.contiguous())
