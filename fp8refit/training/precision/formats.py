"""How an engine's slots hold each tensor of a trainer."""

from collections.abc import Iterable
from dataclasses import dataclass

from fp8refit.errors import PrecisionError
from fp8refit.live.formats import WHOLE, BlockFormat
from fp8refit.live.layout import EngineLayout, SlotLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """How an engine holds one checkpoint tensor, or a stack of them."""

    shape: tuple[int, ...]
    block_format: BlockFormat | None
    """None if it is not quantized."""
    dtype: str
    slots: tuple[str, ...]
    """Names of the slots it fills."""


def held_by(layout: EngineLayout) -> dict[str, Held]:
    """Return how the engine holds every tensor that a trainer may have, by checkpoint name.

    Raises:
        PrecisionError: The engine cannot be refitted, or holds one tensor in several formats; names each.
    """
    problems = [f"the engine cannot be refitted: {refusal}" for refusal in layout.refusals]
    by_name: dict[str, list[SlotLayout]] = {}
    for slot in layout.slots:
        by_name.setdefault(slot.name, []).append(slot)
        problems += _problems(slot)
    held: dict[str, Held] = {}
    for name, slots in by_name.items():
        try:
            held[name] = _held(slots, slots[0].full_shape)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    for stack in layout.stacked:
        slots = [slot for part in stack.parts for slot in by_name.get(part, ())]
        try:
            found = _held(slots, stack.shape)
        except ValueError as error:
            problems.append(f"{stack.name}: {error}")
            continue
        block = found.block_format.block_size[0] if found.block_format is not None else 1
        if stack.is_transposed or any(first % block for _, first in stack.parts.values()):
            problems.append(f"{stack.name}: its matrices are transposed, or do not start at a block of {block} rows")
        held[stack.name] = found
    if problems:
        raise PrecisionError(problems)
    return held


def formats_of(layout: EngineLayout) -> dict[str, BlockFormat]:
    """Return blocks and scales of every tensor that the engine holds as block FP8."""
    return {name: held.block_format for name, held in held_by(layout).items() if held.block_format is not None}


def _held(slots: list[SlotLayout], shape: tuple[int, ...]) -> Held:
    """Combine slots of the same format.

    Raises:
        ValueError: Their formats differ.
    """
    ways = {(slot.format, slot.dtype) for slot in slots}
    if len(ways) != 1:
        said = ", ".join(sorted(dtype if block_format is None else str(block_format) for block_format, dtype in ways))
        raise ValueError(f"slots of this engine hold it in different formats ({said}), but a forward pass has only one")
    ((block_format, dtype),) = ways
    return Held(
        shape=shape,
        block_format=block_format,
        dtype=dtype,
        slots=tuple(dict.fromkeys(slot.name for slot in slots)),
    )


def _problems(slot: SlotLayout) -> Iterable[str]:
    if slot.is_rearranged:
        yield f"{slot.name}: this engine holds it quantized in an order that a trainer cannot multiply in"
    if slot.format is not None and WHOLE in slot.format.block_size:
        yield f"{slot.name}: this engine holds it with {slot.format}; a trainer can multiply by blocks only"
    elif slot.format is not None and (slot.format.is_tiled or slot.format.scale_format.has_exponents):
        yield f"{slot.name}: this engine holds it as MXFP8, which a trainer cannot multiply in"
    elif slot.format is not None and slot.format.block_at(slot.offset) is None:
        yield (
            f"{slot.name}: a rank of this engine begins at {list(slot.offset)}, inside a block of the whole tensor, so its "
            "codes differ from a trainer's"
        )
