"""The command line. Tables and progress are for people; with `--json`, standard output is only JSON."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer
import typer.core
from pydantic import ValidationError
from rich.filesize import decimal
from rich.markup import escape

from fp8refit import __version__
from fp8refit.cli.bench_commands import AsJson, bench
from fp8refit.cli.console import (
    EXIT_FAILED,
    EXIT_REFUSED,
    byte_progress,
    complain,
    make_console,
    make_table,
    print_line,
    push_progress,
    write_json,
    write_result,
)
from fp8refit.cli.guards import ended_in_order, make_folder, options_checked, standard_output_to_error
from fp8refit.cli.show_layout import show_layout
from fp8refit.config import RefitConfig
from fp8refit.driver.adapters import find_adapter
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import CheckpointError, RefitError, UnsupportedEngineError, install
from fp8refit.live.formats import PER_ROW, Container, ScaleFormat
from fp8refit.live.layout import EngineLayout

if TYPE_CHECKING:
    from fp8refit.checkpoint import CheckpointReport, PushResult
    from fp8refit.cli.demo import DemoConfig, DemoResult, Round


_FloatScales: TypeAlias = Literal["fp32", "ue8m0", "fp32_floored", "fp32_reciprocal", "fp32_dividing"]
"""`FLOAT_SCALES`, as the command line takes them."""


class _Commands(typer.core.TyperGroup):
    """Shows errors that fp8refit raises on purpose as messages instead of tracebacks."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RefitError as error:
            complain(str(error))
            raise typer.Exit(EXIT_REFUSED) from error


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


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
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    refit_every: Annotated[int, typer.Option(min=1, help="Optimizer steps between refits.")] = 10,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the chart.")] = Path("fp8refit-demo"),
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and sampling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a small policy here and keep an FP8 engine up to date."""
    try:
        from fp8refit.cli.demo import DemoConfig, run_demo
    except ModuleNotFoundError as error:
        raise UnsupportedEngineError(f"the demo needs {error.name}: {install('demo')}") from error
    with options_checked():
        config = DemoConfig(steps=steps, refit_every=refit_every, out=out, seed=seed)
    make_folder(out, "--out")
    if as_json:
        result = run_demo(config, on_round=write_json)
        write_json(result)
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
    """Boot an engine and show what of it can be refitted. These are slots, kernels, formats, and refusals."""
    adapter = find_adapter(engine)
    with ended_in_order(), standard_output_to_error(), Refitter(adapter.boot(model)) as refitter:
        layout = refitter.layout()
    write_result(layout, show_layout, as_json=as_json)


@app.command()
def doctor(
    target: Annotated[
        str | None, typer.Argument(help="URL of a running server, or model folder to boot from with --engine.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Engine to boot, as for `inspect`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether this machine, and an engine, can do refits. Shows versions, plugins, GPUs and transports."""
    from fp8refit.cli.doctor import Diagnosis, check_engine, check_machine, judge_machine, show_diagnosis

    if engine is not None and target is None:
        raise typer.BadParameter("needs a model folder", param_hint="--engine")
    checks = list(check_machine())
    if target is None:
        checks.append(judge_machine(checks))
    else:
        boot = find_adapter(engine).boot if engine is not None else str
        with ended_in_order(), standard_output_to_error(), Refitter(boot(target)) as refitter:
            checks += check_engine(target, refitter.layout())
    diagnosis = Diagnosis(checks=tuple(checks))
    write_result(diagnosis, show_diagnosis, as_json=as_json)
    if diagnosis.problems:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def quantize(
    src: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Checkpoint folder in BF16.")],
    dst: Annotated[Path, typer.Argument(help="Folder to write.")],
    like: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Layout of the engine to write for, from `inspect --json`."),
    ] = None,
    scale_format: Annotated[
        _FloatScales | None,
        typer.Option(help="Format of every scale of blocks, unless a layout says otherwise.", show_default="fp32"),
    ] = None,
    per_channel: Annotated[
        bool, typer.Option("--per-channel", help="One scale per row instead of one per block, in compressed-tensors.")
    ] = False,
    container: Annotated[
        Container | None,
        typer.Option(
            help="Whose names and config.json the checkpoint has, unless a layout says otherwise.", show_default="fp8"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an FP8 checkpoint for an engine to boot from. It has the bytes that a refit would write."""
    from fp8refit.checkpoint import quantize_checkpoint

    options: dict[str, Any] = {
        "scale_format": ScaleFormat(scale_format or ScaleFormat.FP32),
        "container": container or Container.FP8,
    }
    if per_channel:
        if container is not None and not container.holds(PER_ROW):
            raise typer.BadParameter(f"{container} has no scales per row", param_hint="--container")
        if scale_format is not None or like is not None:
            raise typer.BadParameter("leave out --scale-format and --like", param_hint="--per-channel")
        options = {
            "scale_format": PER_ROW.scale_format,
            "block_size": PER_ROW.block_size,
            "container": Container.COMPRESSED_TENSORS,
        }
    layout = _read_layout(like) if like is not None else None
    with ended_in_order(), byte_progress("quantize") as on_progress:
        report = quantize_checkpoint(src, dst, like=layout, on_progress=on_progress, **options)
    write_result(report, partial(_show_checkpoint, dst), as_json=as_json)


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
        str, typer.Option(help="What to do with running requests: wait, abort, keep or continue.")
    ] = RefitConfig().in_flight,
    rename: Annotated[
        str | None,
        typer.Option(
            help="Prefixes of names to replace, such as actor.=,model.language_model.=model. for two of them."
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait at each step; reading the checkpoint is one step.")
    ] = RefitConfig().timeout_s,
    as_json: AsJson = False,
) -> None:
    """Send a checkpoint into running vLLM and SGLang servers.

    FP8REFIT_API_KEY is sent to servers that require an API key, FP8REFIT_TOKEN to servers that were started with it.
    """
    from fp8refit.checkpoint import push_checkpoint

    if host is not None and transport != "collective":
        raise typer.BadParameter("needs --transport collective", param_hint="--host")
    with options_checked():
        config = RefitConfig(
            transport=transport,  # type: ignore[arg-type]
            collective={} if host is None else {"host": host},  # type: ignore[arg-type]
            in_flight=in_flight,  # type: ignore[arg-type]
            rename=rename,
            timeout_s=timeout_s,
        )
    with push_progress(to) as on_progress:
        result = push_checkpoint(checkpoint, to, config, on_progress=on_progress)
    write_result(result, _show_push, as_json=as_json)
    if result.failed:
        raise typer.Exit(EXIT_REFUSED if len(result.failed) == len(result.servers) else EXIT_FAILED)


app.add_typer(bench, name="bench")


def _show_demo(config: "DemoConfig") -> "DemoResult":
    """Run the demo under a live table, then show its results."""
    from fp8refit.cli.demo import run_demo

    console = make_console()
    what = f"Trains a policy of 3 million parameters for {config.steps} steps; refits an FP8 engine every {config.refit_every}."
    print_line(console, f"{what}\n100 steps take less than a minute on two idle cores. Held-out loss, nats per byte:")
    names = ("step", "version", "train", "trainer", "refitted", "stale", "refit ms", "GB/s")
    print_line(console, " ".join(f"{name:>8}" for name in names))
    result = run_demo(config, on_round=lambda row: print_line(console, " ".join(f"{c:>8}" for c in _demo_cells(row))))
    console.print(f"\n[bold]The refitted engine writes:[/bold]\n{escape(result.sample)}\n", highlight=False)
    console.print(
        f"Held-out loss fell by {result.fall:.1%}; engine and trainer differ by at most {result.gap:.2%}. "
        f"Chart: {result.chart}. {result.seconds:.0f} s."
    )
    for problem in result.problems:
        complain(problem)
    return result


def _demo_cells(row: "Round") -> Iterable[str]:
    yield from (str(row.step), str(row.version))
    yield f"{row.train_loss:.3f}" if row.train_loss is not None else ""
    yield from (f"{loss:.4f}" for loss in (row.trainer_loss, row.refitted_loss, row.stale_loss))
    yield f"{row.refit_ms:.1f}" if row.refit_ms is not None else ""
    yield f"{row.gb_per_s:.2f}" if row.gb_per_s is not None else ""


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


def _show_checkpoint(folder: Path, report: "CheckpointReport") -> None:
    print_line(console := make_console(), f"wrote {folder}")
    table = make_table("tensors", "number", "scales")
    for scale_format, count in report.scale_formats.items():
        table.add_row("quantized", str(count), scale_format)
    table.add_row("copied", str(report.num_copied), "")
    console.print(table)
    num_shards = len(report.shards)
    sizes = f"{decimal(report.bytes_read)} read, {decimal(report.bytes_written)} written"
    print_line(console, f"{sizes} to {num_shards} safetensors file{'s' * (num_shards != 1)}")


def _show_push(result: "PushResult") -> None:
    table = make_table("server", "engine", "version", "read by", title=result.checkpoint)
    table.add_column("seconds", justify="right", no_wrap=True)
    for pushed in result.servers:
        version = str(pushed.report.version) if pushed.report is not None else "dirty" if pushed.is_dirty else "failed"
        table.add_row(escape(pushed.url), pushed.engine, version, pushed.read_by, f"{pushed.seconds:.2f}")
    make_console().print(table)
    for pushed in result.failed:
        complain(f"{pushed.url}: {pushed.error}")
