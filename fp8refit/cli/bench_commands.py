"""`fp8refit bench`."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pydantic import BaseModel

from fp8refit.cli.console import EXIT_FAILED, make_console, make_table, step_progress, write_result
from fp8refit.cli.guards import ended_in_order, make_folder, options_checked, standard_output_to_error
from fp8refit.errors import UnsupportedEngineError

Engine = Annotated[str, typer.Option(help="vllm, sglang, transformers, or another installed adapter's.")]
Model = Annotated[str, typer.Option(help="A named shape (see `bench shapes`), or a folder with a config.json.")]
TensorParallel = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write only JSON to standard output.")]

bench = typer.Typer(no_args_is_help=True, help="Measure refits on this machine, with random weights.")


@bench.command("refit")
def bench_refit(
    engine: Engine,
    model: Model,
    tp: TensorParallel = 1,
    online: Annotated[
        bool, typer.Option("--online", help="Boot an engine that quantizes BF16 weights itself.")
    ] = False,
    quantization: Annotated[
        str | None,
        typer.Option(
            help="How it does, such as fp8_per_channel; implies --online. Or nvfp4, of which it has checkpoints."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs per method.")] = 7,
    warm_up: Annotated[int, typer.Option(min=0, help="Untimed refits after the first.")] = 2,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Other ways to time, separated by commas: the engine's own (by default all), fp8refit's and trainers'; "
            "none for none."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    place: Annotated[
        str | None,
        typer.Option(help="Where the engine runs: inside (this process), outside, or server (its own, by HTTP)."),
    ] = None,
    gpu: Annotated[int | None, typer.Option(min=0, help="GPU of the trainer, if not that of the engine.")] = None,
    clients: Annotated[int, typer.Option(min=0, help="Clients that keep a server busy.")] = 0,
    in_flight: Annotated[
        str, typer.Option(help="What becomes of their requests: wait, keep, continue or abort.")
    ] = "wait",
    plot: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for plots.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time refits of a live engine, and other ways to load weights."""
    from fp8refit.bench import RefitBenchConfig, run_refit_bench
    from fp8refit.bench.plots import plot_refits
    from fp8refit.bench.shapes import CHECKPOINTS
    from fp8refit.bench.tables import refit_tables

    if online and quantization in CHECKPOINTS:
        raise typer.BadParameter(f"no engine makes {quantization} of BF16 weights itself", param_hint="--online")
    names = None if strategies is None else tuple(name.strip() for name in strategies.split(",") if name != "none")
    with options_checked():
        config = RefitBenchConfig(
            engine=engine,
            model=model,
            tp=tp,
            online=online or quantization not in (None, *CHECKPOINTS),
            **({} if quantization is None else {"quantization": quantization}),
            rounds=rounds,
            warm_up=warm_up,
            strategies=names,
            seed=seed,
            place=place,  # type: ignore[arg-type]
            gpu=gpu,
            clients=clients,
            in_flight=in_flight,  # type: ignore[arg-type]
        )
    if plot is not None:
        make_folder(plot, "--plot")
    with ended_in_order(), standard_output_to_error(), step_progress() as on_progress:
        result = run_refit_bench(config, on_progress=on_progress)
    if plot is not None:
        plot_refits([result], plot)
    write_result(result, lambda found: make_console().print(refit_tables(found)), as_json=as_json)
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
    """Time the quantizer alone, and compare it with the copy rate."""
    from fp8refit.bench import KernelBenchConfig, run_kernel_bench
    from fp8refit.bench.kernel import DEFAULT_SHAPES
    from fp8refit.bench.tables import kernel_table

    where = _read_device(device)
    with options_checked():
        config = KernelBenchConfig(
            shapes=DEFAULT_SHAPES if shapes is None else _read_shapes(shapes),
            dtypes=dtypes.split(","),  # type: ignore[arg-type]
            repeats=repeats,
            min_bytes=1 << 30 if where.type == "cuda" else 1 << 22,
        )
    with step_progress() as on_progress:
        result = run_kernel_bench(config, device=where, on_progress=on_progress)
    write_result(result, lambda found: make_console().print(kernel_table(found)), as_json=as_json)


@bench.command("rollout")
def bench_rollout(
    engine: Engine,
    model: Model,
    tp: TensorParallel = 1,
    precisions: Annotated[
        str, typer.Option(help="bf16, fp8, fp8+kv; with vLLM also fp8_per_channel, fp8_per_tensor and mxfp8.")
    ] = "bf16,fp8,fp8+kv",
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
    """Time rollouts in BF16, in FP8, and with an FP8 KV cache."""
    from fp8refit.bench import RolloutBenchConfig, RolloutBenchResult, run_rollout_bench
    from fp8refit.bench.tables import rollout_table

    with options_checked():
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

    with ended_in_order(), standard_output_to_error(), step_progress() as on_progress:
        result = run_rollout_bench(config, earlier=earlier, on_progress=on_progress, on_result=keep)
    write_result(result, lambda found: make_console().print(rollout_table(found)), as_json=as_json)


@bench.command("shapes")
def bench_shapes() -> None:
    """List the named models."""
    from fp8refit.bench import SHAPES

    table = make_table("name", "architecture", "layers", "hidden", "experts")
    for name, config in SHAPES.items():
        experts = config.get("num_experts") or config.get("n_routed_experts") or ""
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        table.add_row(name, config["architectures"][0], str(layers), str(hidden), str(experts))
    make_console().print(table)


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
