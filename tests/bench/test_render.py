"""The page of benchmarks says what was measured, and the committed one what the committed results say."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fp8refit.bench import (
    KernelBenchConfig,
    RefitBenchConfig,
    RolloutBenchConfig,
    run_kernel_bench,
    run_refit_bench,
    run_rollout_bench,
)
from fp8refit.bench.plots import digest_of

ROOT = Path(__file__).parents[2]


def load_renderer():
    spec = importlib.util.spec_from_file_location("render_benchmarks", ROOT / "benchmarks" / "render_benchmarks.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


renderer = load_renderer()


def test_the_committed_page_and_pictures_are_of_the_committed_results():
    measured = renderer.read(renderer.RESULTS)
    command = "run: python -m benchmarks.render"
    is_empty = not (measured.refits or measured.kernels or measured.rollouts)
    assert is_empty or (renderer.DOCS / "benchmarks.md").read_text() == renderer.render(measured), command
    for name, (_, results) in renderer.figures(measured).items():
        assert digest_of(results).encode() in (renderer.DOCS / "figures" / name).read_bytes(), command


@pytest.fixture(scope="module")
def results():
    """Measured here, and one made of it that another engine might have given."""
    refit = run_refit_bench(RefitBenchConfig(engine="transformers", model="tiny", rounds=1, warm_up=0))
    larger = {"bytes_read": 10 * refit.bytes_read, "bytes_written": 10 * refit.bytes_written, "is_repeatable": False}
    config = refit.config.model_copy(update={"engine": "vllm", "online": True, "model": "larger"})
    other = refit.others[0].model_copy(update={"equals_ours": False, "name": "reload"})
    return {
        "bench_refit_transformers_tiny": refit,
        "bench_refit_vllm-online_tiny": refit.model_copy(update={"config": config, "others": (other,)}),
        "bench_refit_vllm-online_larger": refit.model_copy(update={"config": config, "others": ()} | larger),
        "bench_kernel": run_kernel_bench(
            KernelBenchConfig(shapes=((128, 128),), repeats=3, min_bytes=1), device=torch.device("cpu")
        ),
        "bench_rollout_transformers_tiny": run_rollout_bench(
            RolloutBenchConfig(
                engine="transformers",
                model="tiny",
                precisions=("bf16", "fp8"),
                batch_sizes=(1,),
                context_lengths=(4,),
                num_new_tokens=(2,),
                repeats=1,
            )
        ),
    }


@pytest.fixture(scope="module")
def measured(results, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    for name, result in results.items():
        (folder / f"{name}_cpu.json").write_text(result.model_dump_json())
    return renderer.read(folder)


@pytest.fixture(scope="module")
def page(measured):
    return renderer.render(measured)


def rows_of(page, first):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return [row for row in rows if row[0] == first]


def test_every_result_is_on_the_page_with_its_command(results, page):
    assert all(page.count(result.command) >= 1 for result in results.values())
    titles = [line for line in page.splitlines() if line.startswith("#")]
    assert titles == [
        "# Benchmarks",
        "## A refit of a live engine",
        "### vLLM, booted to quantize BF16 weights itself (block FP8)",
        "### transformers",
        "## The quantizer alone",
        "## What FP8 buys: rollouts",
        "### transformers",
    ]


def test_a_row_says_what_was_measured(results, page):
    refit = results["bench_refit_transformers_tiny"]
    row, comparison, *_ = rows_of(page, "tiny")
    found = dict(zip(renderer.COLUMNS, row, strict=True))
    assert found["tensors"] == str(refit.num_tensors)
    assert found["call to return"] == f"**{refit.wall_ms.median:.2f}**"
    assert found["of copy"] == f"{refit.fill_over_copy:.2f} x"
    assert found["ns/MB"] == f"{1e6 / refit.gb_per_s:.0f} (+0%)"
    assert comparison[1:3] == ["**fp8refit**", f"**{refit.wall_ms.median:.1f}**"]
    assert comparison[-1] == "the same every time"


def test_models_of_one_engine_are_held_against_each_other_smallest_first(results, page):
    """They took as long, one for ten times the bytes."""
    smaller, larger = (row for row in rows_of(page, "larger") if len(row) == len(renderer.COLUMNS))
    assert float(smaller[2]) < float(larger[2])
    assert smaller[11].endswith("(+900%)") and larger[11].endswith("(+0%)")


def test_bytes_that_are_not_ours_are_told(page):
    ends = [row[-1] for row in rows_of(page, "") if "reload" in row]
    assert ends == ["its own"]
    assert [row[-1] for row in rows_of(page, "larger") if len(row) == 7] == [
        "the same every time",
        "NOT the same every time",
    ]


def test_rollouts_are_held_against_bf16(results, page):
    base, fp8 = results["bench_rollout_transformers_tiny"].timings
    expected = [f"{base.tokens_per_s.median:,.0f}", f"{fp8.tokens_per_s.median:,.0f} ({fp8.against_bf16:.2f} x)"]
    assert rows_of(page, "tiny")[-1] == ["tiny", "1", "4", "2", *(cell.replace(",", " ") for cell in expected)]


def test_room_for_tokens_is_told_where_it_is_known(results):
    result = results["bench_rollout_transformers_tiny"].model_copy(update={"kv_tokens": {"bf16": 1000, "fp8": 23000}})
    first, second = (rows_of(renderer.render_rollouts("vllm", [result]), name)[-1] for name in ("tiny", ""))
    assert first == ["tiny", "", "", "tokens in the KV cache", "1 000", "23 000"]
    assert second[:4] == ["", "1", "4", "2"]


def test_pictures_are_named_on_the_page_and_know_their_results(measured, page, tmp_path):
    figures = renderer.figures(measured)
    assert sorted(figures) == sorted(
        line.partition("(figures/")[2].rstrip(")") for line in page.splitlines() if line.startswith("![")
    )
    plot, results = figures["vllm-online_phases.png"]
    drawn = plot(results, tmp_path / "phases.png").read_bytes()
    assert digest_of(results).encode() in drawn
    assert digest_of(measured.all_refits) != digest_of(results)


def test_without_results_there_is_nothing_to_say(tmp_path):
    measured = renderer.read(tmp_path)
    assert renderer.render(measured) == renderer.HEAD
    assert renderer.figures(measured) == {}
