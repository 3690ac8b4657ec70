"""The command line. Tables and progress are for people; with `--json`, standard output is only JSON."""

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
import typer.core
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table

from fp8refit import __version__
from fp8refit.config import RefitConfig
from fp8refit.driver.adapters import find_adapter
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import CheckpointError, RefitError, UnsupportedEngineError
from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.live.names import in_one, without_numbers
from fp8refit.live.slots import ScaleFormat

if TYPE_CHECKING:
    from fp8refit.cli.demo import DemoConfig, DemoResult, Round
    from fp8refit.cli.push import PushResult

EXIT_FAILED = 1
"""The command ran, but its result is bad."""
EXIT_REFUSED = 2
"""The command was refused: a `RefitError` or invalid options."""
_WIDE = 10_000
"""Columns of a table without limit."""


class _Commands(typer.core.TyperGroup):
    """Shows errors that fp8refit raises on purpose as messages instead of tracebacks."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RefitError as error:
            _complain(str(error))
            raise typer.Exit(EXIT_REFUSED) from error


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

AsJson = Annotated[bool, typer.Option("--json", help="Write only JSON to standard output.")]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Move a live block-FP8 inference engine to a new policy in place, at memory speed, all or nothing."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 150,
    refit_every: Annotated[int, typer.Option(min=1, help="Optimizer steps between refits.")] = 15,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the chart.")] = Path("fp8refit-demo"),
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and sampling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a small policy on this machine and keep an FP8 engine up to date with it, round by round."""
    try:
        from fp8refit.cli.demo import DemoConfig, run_demo
    except ModuleNotFoundError as error:
        raise UnsupportedEngineError(f"the demo needs {error.name}: pip install 'fp8refit[demo]'") from error
    with _options_checked():
        config = DemoConfig(steps=steps, refit_every=refit_every, out=out, seed=seed)
    _make_folder(out, "--out")
    if as_json:
        result = run_demo(config, on_round=_write_json)
        _write_json(result)
    else:
        result = _show_demo(config)
    if result.problems:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Model folder to boot from.")],
    engine: Annotated[str, typer.Option(help="Engine to boot: vllm, transformers, or another installed adapter's.")],
    as_json: AsJson = False,
) -> None:
    """Boot an engine and show what it holds: slots, kernels, formats, and what cannot be refitted."""
    adapter = find_adapter(engine)
    with _ended_in_order(), _standard_output_to_error(), Refitter(adapter.boot(model)) as refitter:
        layout = refitter.layout()
    if as_json:
        _write_json(layout)
    else:
        _show_layout(layout)


@app.command()
def quantize(
    src: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Checkpoint folder in BF16.")],
    dst: Annotated[Path, typer.Argument(help="Folder to write.")],
    like: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Layout of the engine to write for, from `inspect --json`."),
    ] = None,
    scale_format: Annotated[
        ScaleFormat, typer.Option(help="Format of every scale, unless a layout says otherwise.")
    ] = ScaleFormat.FP32,
    as_json: AsJson = False,
) -> None:
    """Write the block-FP8 checkpoint that an engine can boot from, with the bytes that a refit would write."""
    from fp8refit.cli.checkpoint import quantize_checkpoint

    layout = _read_layout(like) if like is not None else None
    with _ended_in_order(), _byte_progress("quantize") as on_progress:
        report = quantize_checkpoint(src, dst, like=layout, scale_format=scale_format, on_progress=on_progress)
    if as_json:
        _write_json(report)
    else:
        _show_fields(report, title=str(dst))


@app.command()
def push(
    checkpoint: Annotated[Path, typer.Argument(exists=True, help="Safetensors file or folder.")],
    to: Annotated[list[str], typer.Option(help="URL of a running server; repeat for each replica.")],
    transport: Annotated[
        str,
        typer.Option(
            help="auto: each server on its own, from files it can see or from this process's memory. collective: one "
            "broadcast to all servers; all commit or none does."
        ),
    ] = RefitConfig().transport,
    host: Annotated[
        str | None, typer.Option(help="For a broadcast to other hosts: this host's address as servers can reach it.")
    ] = None,
    in_flight: Annotated[
        str, typer.Option(help="What to do with running requests: wait, abort or keep.")
    ] = RefitConfig().in_flight,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait at each step; reading the checkpoint is one step.")
    ] = RefitConfig().timeout_s,
    as_json: AsJson = False,
) -> None:
    """Send a checkpoint to running vLLM and SGLang servers, in place.

    FP8REFIT_API_KEY is sent to servers that require an API key, FP8REFIT_TOKEN to servers that were started with it.
    """
    from fp8refit.cli.push import push_checkpoint

    if host is not None and transport != "collective":
        raise typer.BadParameter("needs --transport collective", param_hint="--host")
    with _options_checked():
        config = RefitConfig(
            transport=transport,  # type: ignore[arg-type]
            collective={} if host is None else {"host": host},  # type: ignore[arg-type]
            in_flight=in_flight,  # type: ignore[arg-type]
            timeout_s=timeout_s,
        )
    with _push_progress(to) as on_progress:
        result = push_checkpoint(checkpoint, to, config, on_progress=on_progress)
    if as_json:
        _write_json(result)
    else:
        _show_push(result)
    if result.failed:
        raise typer.Exit(EXIT_REFUSED if len(result.failed) == len(result.servers) else EXIT_FAILED)


bench = typer.Typer(no_args_is_help=True, help="Measure refits on this machine, with random weights.")
app.add_typer(bench, name="bench")


@bench.command("refit")
def bench_refit(
    engine: Annotated[str, typer.Option(help="vllm, sglang, transformers, or another installed adapter's.")],
    model: Annotated[str, typer.Option(help="A named shape (see `bench shapes`), or a folder with a config.json.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    online: Annotated[
        bool, typer.Option("--online", help="Boot an engine that quantizes BF16 weights itself.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs per method.")] = 7,
    warm_up: Annotated[int, typer.Option(min=0, help="Untimed refits after the first.")] = 2,
    strategies: Annotated[
        str | None, typer.Option(help="The engine's own methods to time too, separated by commas; none for none.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    plot: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for plots.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time refits of a live engine, phase by phase, and the engine's own methods to load new weights."""
    from fp8refit.bench import RefitBenchConfig, run_refit_bench
    from fp8refit.bench.plots import plot_refits
    from fp8refit.bench.tables import refit_tables

    names = None if strategies is None else tuple(name.strip() for name in strategies.split(",") if name != "none")
    with _options_checked():
        config = RefitBenchConfig(
            engine=engine,
            model=model,
            tp=tp,
            online=online,
            rounds=rounds,
            warm_up=warm_up,
            strategies=names,
            seed=seed,
        )
    if plot is not None:
        _make_folder(plot, "--plot")
    with _ended_in_order(), _standard_output_to_error(), _step_progress() as on_progress:
        result = run_refit_bench(config, on_progress=on_progress)
    if plot is not None:
        plot_refits([result], plot)
    if as_json:
        _write_json(result)
    else:
        _console().print(refit_tables(result))
    if not result.is_repeatable:
        raise typer.Exit(EXIT_FAILED)


@bench.command("kernel")
def bench_kernel(
    shapes: Annotated[str | None, typer.Option(help="Matrices, such as 4096x4096,1536x2048.")] = None,
    dtypes: Annotated[str, typer.Option(help="dtypes of the weights, separated by commas.")] = "bfloat16,float32",
    repeats: Annotated[int, typer.Option(min=3, help="Timed launches per case.")] = 21,
    device: Annotated[str, typer.Option(help="cuda, or cpu for the torch reference.")] = "cuda",
    as_json: AsJson = False,
) -> None:
    """Time the quantizer alone, by shape, dtype and scale format, and compare with the copy rate."""
    from fp8refit.bench import KernelBenchConfig, run_kernel_bench
    from fp8refit.bench.kernel import DEFAULT_SHAPES
    from fp8refit.bench.tables import kernel_table

    where = _read_device(device)
    with _options_checked():
        config = KernelBenchConfig(
            shapes=DEFAULT_SHAPES if shapes is None else _read_shapes(shapes),
            dtypes=dtypes.split(","),  # type: ignore[arg-type]
            repeats=repeats,
            min_bytes=1 << 30 if where.type == "cuda" else 1 << 22,
        )
    with _step_progress() as on_progress:
        result = run_kernel_bench(config, device=where, on_progress=on_progress)
    if as_json:
        _write_json(result)
    else:
        _console().print(kernel_table(result))


@bench.command("rollout")
def bench_rollout(
    engine: Annotated[str, typer.Option(help="vllm, sglang, transformers, or another installed adapter's.")],
    model: Annotated[str, typer.Option(help="A named shape (see `bench shapes`), or a folder with a config.json.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    precisions: Annotated[str, typer.Option(help="bf16, fp8 or fp8+kv, separated by commas.")] = "bf16,fp8,fp8+kv",
    batch_sizes: Annotated[str, typer.Option(help="Sequences at a time, separated by commas.")] = "8,64,256",
    context_lengths: Annotated[str, typer.Option(help="Tokens per prompt, separated by commas.")] = "512,4096",
    new_tokens: Annotated[str, typer.Option(help="New tokens per sequence, separated by commas.")] = "256",
    cases: Annotated[
        str | None,
        typer.Option(help="Sequences x prompt + new tokens, instead of all combinations: 16x512+512,64x4096+256."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs per case.")] = 3,
    case_seconds: Annotated[
        float | None, typer.Option(help="Stop repeating a case once its timed runs have taken this long.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and prompts.")] = 0,
    arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Engine argument with a JSON value, such as max_num_batched_tokens=8192; repeat for each."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="JSON file, written after every case. An existing one is continued."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time rollouts with BF16 weights, FP8 weights, and FP8 weights with an FP8 KV cache."""
    from fp8refit.bench import RolloutBenchConfig, RolloutBenchResult, run_rollout_bench
    from fp8refit.bench.tables import rollout_table

    with _options_checked():
        config = RolloutBenchConfig(
            engine=engine,
            model=model,
            tp=tp,
            precisions=precisions.split(","),  # type: ignore[arg-type]
            batch_sizes=batch_sizes.split(","),  # type: ignore[arg-type]
            context_lengths=context_lengths.split(","),  # type: ignore[arg-type]
            num_new_tokens=new_tokens.split(","),  # type: ignore[arg-type]
            cases=() if cases is None else tuple(map(_read_case, cases.split(","))),
            repeats=repeats,
            case_seconds=case_seconds,
            seed=seed,
            engine_arguments=dict(map(_read_argument, arguments or ())),
        )
        earlier = None
        if out is not None and out.exists():
            earlier = RolloutBenchResult.model_validate_json(out.read_text())

    def keep(result: BaseModel) -> None:
        if out is not None:
            out.write_text(result.model_dump_json() + "\n")

    with _ended_in_order(), _standard_output_to_error(), _step_progress() as on_progress:
        result = run_rollout_bench(config, earlier=earlier, on_progress=on_progress, on_result=keep)
    if as_json:
        _write_json(result)
    else:
        _console().print(rollout_table(result))


@bench.command("shapes")
def bench_shapes() -> None:
    """List the named models."""
    from fp8refit.bench import SHAPES

    table = _table("name", "architecture", "layers", "hidden", "experts")
    for name, config in SHAPES.items():
        experts = config.get("num_experts") or config.get("n_routed_experts") or ""
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        table.add_row(name, config["architectures"][0], str(layers), str(hidden), str(experts))
    _console().print(table)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP act like Ctrl-C, so that temporary files are removed. A second signal ends the process at
    once.

    A signal that is ignored, as under nohup, stays ignored.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _options_checked() -> Iterator[None]:
    """Report which option a config refuses.

    Raises:
        typer.BadParameter: It refuses one.
    """
    try:
        yield
    except ValidationError as error:
        problem = error.errors()[0]
        field = [part for part in problem["loc"] if isinstance(part, str)][-1]
        option = f"--{field.removeprefix('num_').replace('_', '-')}"
        raise typer.BadParameter(f"{problem['input']!r}: {problem['msg']}", param_hint=option) from error


def _make_folder(folder: Path, option: str) -> None:
    """Create the folder for results before a long run.

    Raises:
        typer.BadParameter: It cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {folder} ({error})", param_hint=option) from error


def _read_device(text: str) -> torch.device:
    """Parse a CPU or an available GPU.

    Raises:
        typer.BadParameter: It is neither.
        UnsupportedEngineError: There is no GPU.
    """
    kind, _, index = text.partition(":")
    if text != "cpu" and (kind != "cuda" or (index and not index.isdecimal())):
        raise typer.BadParameter(f"{text!r} is not a device; pass cuda, cuda:1 or cpu", param_hint="--device")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UnsupportedEngineError("there is no CUDA device; use --device cpu to time the torch reference")
    if index and int(index) >= torch.cuda.device_count():
        raise typer.BadParameter(f"{text!r}: there are {torch.cuda.device_count()} GPUs", param_hint="--device")
    return torch.device(text)


def _read_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse matrices such as `4096x4096,1536x2048`.

    Raises:
        typer.BadParameter: It is not such a list.
    """
    try:
        pairs = [tuple(map(int, item.split("x"))) for item in text.split(",")]
        return tuple((rows, cols) for rows, cols in pairs)
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not a list of matrices; write 4096x4096,1536x2048", param_hint="--shapes"
        ) from error


def _read_case(text: str) -> tuple[int, int, int]:
    """Parse sequences, prompt tokens and new tokens, such as `16x512+256`.

    Raises:
        typer.BadParameter: It is not a case.
    """
    found = re.fullmatch(r"(\d{1,9})x(\d{1,9})\+(\d{1,9})", text, re.ASCII)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a case; write 16x512+256", param_hint="--cases")
    batch, length, num_new = map(int, found.groups())
    return batch, length, num_new


def _read_argument(text: str) -> tuple[str, Any]:
    """Parse `name=JSON`.

    Raises:
        typer.BadParameter: It has another form.
    """
    name, found, value = text.partition("=")
    try:
        if not found or not name.isidentifier():
            raise ValueError("no name=value")
        return name, json.loads(value)
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not an argument with a JSON value, such as block_size=32 ({error})", param_hint="--set"
        ) from error


def _write_json(model: BaseModel) -> None:
    typer.echo(model.model_dump_json())


def _complain(text: str) -> None:
    """Write an error to standard error. Lines are not broken, so that names in them can be searched for."""
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def _console() -> Console:
    """Return a console for standard output: as wide as the terminal, unlimited in a file or pipe."""
    is_narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_narrow else _WIDE)


def _table(*names: str, title: str | None = None, show_header: bool = True) -> Table:
    """Create a table that wraps long cells instead of cutting them."""
    columns = [Column(name, overflow="fold") for name in names]
    return Table(*columns, title=None if title is None else escape(title), show_header=show_header)


def _show_demo(config: "DemoConfig") -> "DemoResult":
    """Run the demo under a live table, then show its results."""
    from fp8refit.cli.demo import run_demo

    console = _console()
    table = Table("step", "version", "train", title="held-out loss, nats per byte")
    for column in ("trainer", "FP8 refitted", "FP8 stale", "refit ms", "GB/s"):
        table.add_column(column, justify="right")
    with Live(table, console=console, refresh_per_second=4):
        result = run_demo(config, on_round=lambda row: table.add_row(*_demo_cells(row)))
    console.print(f"\n[bold]The refitted engine writes:[/bold]\n{escape(result.sample)}\n", highlight=False)
    console.print(
        f"Held-out loss fell by {result.fall:.1%}; engine and trainer differ by at most {result.gap:.2%}. "
        f"Chart: {result.chart}. {result.seconds:.0f} s."
    )
    for problem in result.problems:
        _complain(problem)
    return result


def _demo_cells(row: "Round") -> Iterable[str]:
    yield from (str(row.step), str(row.version))
    yield f"{row.train_loss:.3f}" if row.train_loss is not None else ""
    yield from (f"{loss:.4f}" for loss in (row.trainer_loss, row.refitted_loss, row.stale_loss))
    yield f"{row.refit_ms:.1f}" if row.refit_ms is not None else ""
    yield f"{row.gb_per_s:.2f}" if row.gb_per_s is not None else ""


@contextlib.contextmanager
def _standard_output_to_error() -> Iterator[None]:
    """Redirect standard output of engines and their worker processes, C libraries included, to standard error."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # C's own buffer, which would be written when the process ends
        os.dup2(saved, 1)
        os.close(saved)


def _show_layout(layout: EngineLayout) -> None:
    versions = ", ".join(f"{package} {version}" for package, version in layout.versions.items())
    console = _console()
    console.print(f"[bold]{layout.engine}[/bold] on {layout.device} ({versions})", highlight=False)
    console.print(_kinds_table(layout.slots))
    _show_slots(console, layout.slots)
    _show_aliases(console, layout.aliases)
    if layout.kv is not None:
        counts = Counter(kind for kinds in layout.kv.scales.values() for kind in kinds)
        scales = ", ".join(f"{count} of {kind}" for kind, count in counts.items()) or "none"
        place = f"{layout.kv.dtype} under {layout.kv.backend}" if layout.kv.backend else layout.kv.dtype
        console.print(f"KV cache: {place}; scales: {scales}", markup=False, highlight=False, soft_wrap=True)
        for refusal in layout.kv.refusals:
            console.print(
                f"KV scales cannot be set: {refusal}", style="yellow", markup=False, highlight=False, soft_wrap=True
            )
    for refusal in layout.refusals:
        console.print(f"cannot be refitted: {refusal}", style="red", markup=False, highlight=False, soft_wrap=True)


def _kinds_table(slots: Iterable[SlotLayout]) -> Table:
    """Count slots and bytes per kernel and format."""
    counts: Counter[tuple[str, str]] = Counter()
    num_bytes: Counter[tuple[str, str]] = Counter()
    for slot in slots:
        kind = (slot.kernel, _format_of(slot))
        counts[kind] += 1
        num_bytes[kind] += _num_bytes(slot)
    table = _table("kernel", "format", title="kinds")
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
    if Measurement.get(console, console.options.update(max_width=_WIDE), table).maximum <= console.width:
        console.print(table)
        return
    console.print("slots:")
    for (_, place, full, form, kernel), names in rows.items():
        console.print(in_one(names), markup=False, highlight=False, soft_wrap=True)
        console.print(f"  {place} of {full}, {form}, {kernel}", markup=False, highlight=False, soft_wrap=True)


def _show_aliases(console: Console, aliases: Mapping[str, str]) -> None:
    alike: dict[tuple[str, str], list[str]] = {}
    for alias, name in aliases.items():
        alike.setdefault((without_numbers(alias), without_numbers(name)), []).append(alias)
    for names in alike.values():
        slots = in_one(aliases[alias] for alias in names)
        console.print(f"{in_one(names)} shares the slot of {slots}", markup=False, highlight=False, soft_wrap=True)


def _format_of(slot: SlotLayout) -> str:
    if slot.scale_format is None or slot.block_size is None:
        return slot.dtype
    block_n, block_k = slot.block_size
    return f"{slot.dtype}, {slot.scale_format} scales per {block_n}x{block_k} block"


def _num_bytes(slot: SlotLayout) -> int:
    """Bytes of codes or values, and of scales."""
    dtype: torch.dtype = getattr(torch, slot.dtype)
    num_bytes = prod(slot.shape) * dtype.itemsize
    if slot.block_size is not None:
        num_blocks = prod(-(-length // size) for length, size in zip(slot.shape, slot.block_size, strict=True))
        num_bytes += num_blocks * torch.float32.itemsize
    return num_bytes


def _read_layout(path: Path) -> EngineLayout:
    """Read the output of `inspect --json`.

    Raises:
        CheckpointError: It is something else.
    """
    try:
        return EngineLayout.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise CheckpointError(
            f"{path}: is not a layout; write one with `fp8refit inspect MODEL --engine ENGINE --json`"
        ) from error


@contextlib.contextmanager
def _byte_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error, driven by (bytes done, bytes in total)."""
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(label, total=None, visible=False)
        yield lambda done, total: progress.update(bar, completed=done, total=total, visible=True)


@contextlib.contextmanager
def _push_progress(urls: Iterable[str]) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar per server on standard error, driven by (URL, bytes done, bytes in total). It pulses until
    then.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars = {url.rstrip("/"): progress.add_task(escape(url), total=None) for url in urls}
        yield lambda url, done, total: progress.update(bars[url], completed=done, total=total)


def _show_push(result: "PushResult") -> None:
    table = _table("server", "engine", "version", "read by", title=result.checkpoint)
    table.add_column("seconds", justify="right", no_wrap=True)
    for pushed in result.servers:
        version = str(pushed.report.version) if pushed.report is not None else "dirty" if pushed.is_dirty else "failed"
        table.add_row(escape(pushed.url), pushed.engine, version, pushed.read_by, f"{pushed.seconds:.2f}")
    _console().print(table)
    for pushed in result.failed:
        _complain(f"{pushed.url}: {pushed.error}")


@contextlib.contextmanager
def _step_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on standard error, driven by (current step, steps done, steps in total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("begin", total=1)
        yield lambda what, done, total: progress.update(bar, description=what, completed=done, total=total)


def _show_fields(report: BaseModel, *, title: str) -> None:
    table = _table("", "", title=title, show_header=False)
    for name, value in report.model_dump(mode="json").items():
        table.add_row(name.replace("_", " "), escape(str(value)))
    _console().print(table)
