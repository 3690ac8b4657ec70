"""Shows what an engine holds."""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod

import torch
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from fp8refit.cli.console import WIDE, make_console, make_table, print_line
from fp8refit.errors import by_cause
from fp8refit.live.layout import NO_SCALES, EngineLayout, SlotLayout
from fp8refit.live.names import in_one, without_numbers


def show_layout(layout: EngineLayout) -> None:
    """Show kinds of slots, every slot, aliases, KV scales, and what cannot be refitted."""
    versions = ", ".join(f"{package} {version}" for package, version in layout.versions.items())
    console = make_console()
    console.print(f"[bold]{layout.engine}[/bold] on {layout.device} ({versions})", highlight=False)
    console.print(layout.verdict, highlight=False)
    console.print(_kinds_table(layout.slots))
    _show_slots(console, layout.slots)
    _show_aliases(console, layout.aliases)
    _show_written(console, layout.written_as)
    if layout.kv is not None:
        place = f"{layout.kv.dtype} under {layout.kv.backend}" if layout.kv.backend else layout.kv.dtype
        counts = Counter(kind for kinds in layout.kv.scales.values() for kind in kinds)
        scales = f"scales: {', '.join(f'{count} of {kind}' for kind, count in counts.items()) or 'none'}"
        print_line(console, f"KV cache: {place}; {scales if layout.kv.is_fp8 else NO_SCALES}")
        for refusal in layout.kv.refusals if layout.kv.is_fp8 else ():
            print_line(console, f"KV scales cannot be set: {refusal}", "yellow")
    if layout.is_proved:
        console.print("The engine's own loader puts random values where these slots say.", highlight=False)
    for refusal in by_cause(layout.refusals):
        print_line(console, f"cannot be refitted: {refusal}", "red")


def _kinds_table(slots: Iterable[SlotLayout]) -> Table:
    """Count slots and bytes per kernel and format."""
    counts: Counter[tuple[str, str]] = Counter()
    num_bytes: Counter[tuple[str, str]] = Counter()
    for slot in slots:
        kind = (slot.kernel, _format_of(slot))
        counts[kind] += 1
        num_bytes[kind] += _num_bytes(slot)
    table = make_table("kernel", "format", title="kinds")
    table.add_column("slots", justify="right", no_wrap=True)
    table.add_column("MB", justify="right", no_wrap=True)
    for kind, count in counts.most_common():
        table.add_row(*map(escape, kind), str(count), f"{num_bytes[kind] / 1e6:.2f}")
    return table


def _show_slots(console: Console, slots: Iterable[SlotLayout]) -> None:
    """Show a row per tensor. Names that differ only in layer and expert numbers share a row.

    If the console is too narrow, each name gets a line of its own instead of being cut.
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    for slot in slots:
        place = f"{list(slot.shape)} at {list(slot.offset)}" if any(slot.offset) else str(list(slot.shape))
        row = (without_numbers(slot.name), place, str(list(slot.full_shape)), _format_of(slot), slot.kernel)
        rows.setdefault(row, []).append(slot.name)
    table = Table("name", "held here", "of", "format", "kernel", title="slots")
    for (_, *cells), names in rows.items():
        table.add_row(*map(escape, [in_one(names), *cells]))
    if Measurement.get(console, console.options.update(max_width=WIDE), table).maximum <= console.width:
        console.print(table)
        return
    console.print("slots:")
    for (_, place, full, form, kernel), names in rows.items():
        print_line(console, in_one(names))
        print_line(console, f"  {place} of {full}, {form}, {kernel}")


def _show_aliases(console: Console, aliases: Mapping[str, str]) -> None:
    alike: dict[tuple[str, str], list[str]] = {}
    for alias, name in aliases.items():
        alike.setdefault((without_numbers(alias), without_numbers(name)), []).append(alias)
    for names in alike.values():
        slots = in_one(aliases[alias] for alias in names)
        print_line(console, f"{in_one(names)} shares the slot of {slots}")


def _show_written(console: Console, written_as: Mapping[str, tuple[str, ...]]) -> None:
    """Show what block-FP8 checkpoints hold under another name, or cannot hold."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, written in written_as.items():
        if written != (name,):
            alike.setdefault(tuple(map(without_numbers, (name, *written))), []).append(name)
    for names in alike.values():
        written = tuple(map(in_one, zip(*(written_as[name] for name in names), strict=True)))
        stored = f"is stored as {', '.join(written)}" if written else "cannot be stored"
        text = f"{in_one(names)} {stored} in a block-FP8 checkpoint for this engine"
        print_line(console, text)


def _format_of(slot: SlotLayout) -> str:
    return slot.dtype if slot.format is None else f"{slot.dtype}, {slot.format}"


def _num_bytes(slot: SlotLayout) -> int:
    """Bytes of codes or values, and of scales."""
    dtype: torch.dtype = getattr(torch, slot.dtype)
    num_bytes = prod(slot.shape) * dtype.itemsize
    if slot.format is not None:
        num_bytes += prod(slot.format.scale_shape(slot.shape)) * slot.format.scale_format.dtype.itemsize
    return num_bytes
