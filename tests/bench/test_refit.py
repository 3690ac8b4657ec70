"""The benchmark itself, on the embedded engine: what it says is what was measured, and bytes are looked at."""

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from fp8refit import Refitter, UnsupportedEngineError
from fp8refit.bench import SHAPES, RefitBenchConfig, policies, run_refit_bench, write_config
from fp8refit.bench.clock import Percentiles
from fp8refit.bench.eager import eager_checkpoint, eager_quantize
from fp8refit.bench.engine import RefitBoot, Strategy, open_bench_engine
from fp8refit.bench.plots import plot_refits
from fp8refit.bench.refit import _Bench
from fp8refit.bench.shapes import block_fp8
from fp8refit.cli import app
from fp8refit.kernels import quantize_blockwise
from fp8refit.live.formats import FLOAT_SCALES, BlockFormat

TINY = {"engine": "transformers", "model": "tiny", "rounds": 2, "warm_up": 1}


@pytest.fixture(scope="module")
def result():
    steps = []
    found = run_refit_bench(RefitBenchConfig(**TINY), on_progress=lambda *step: steps.append(step))
    assert [step[0] for step in steps] == ["boot", "make a policy", "eager", "fp8refit", "eager", "fp8refit", "done"]
    return found


def test_a_run_says_where_the_time_goes(result):
    assert {"plan", "fill", "verify", "flush"} <= result.phases_ms.keys()
    assert all(timing.count == 2 and timing.min <= timing.median <= timing.max for timing in result.phases_ms.values())
    assert sum(timing.min for timing in result.phases_ms.values()) <= result.wall_ms.max
    assert result.plan_fill_verify_ms.median < result.wall_ms.max
    assert result.first_ms > 0 and result.copy_gb_per_s > 0.1
    assert result.fill_device_ms is None and result.host_ms == result.wall_ms
    num_weights = sum(tensor.numel() for tensor in policy_of("tiny").values())
    assert result.bytes_read == 2 * num_weights
    assert result.fill_over_copy == pytest.approx(
        result.phases_ms["fill"].median / 1e3 * result.copy_gb_per_s * 1e9 / (result.bytes_read + result.bytes_written)
    )


def test_the_recipe_of_frameworks_ends_with_the_same_bytes(result):
    (eager,) = result.others
    assert result.is_repeatable and eager.is_repeatable and eager.equals_ours
    assert eager.wall_ms.count == 2


def test_the_command_of_a_result_measures_the_same_again(result):
    arguments = result.command.split()[1:]
    ran = CliRunner().invoke(app, [*arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    again = json.loads(ran.stdout)
    assert again["command"] == result.command
    assert again["config"] == json.loads(result.model_dump_json())["config"]


def test_the_table_names_every_way_and_the_command(result):
    ran = CliRunner().invoke(app, ["bench", "refit", "--engine", "transformers", "--model", "tiny", "--rounds", "1"])
    assert ran.exit_code == 0, ran.output
    for word in ("plan + fill + verify", "eager", "fp8refit's", "first refit", "fp8refit bench refit"):
        assert word in ran.stdout


def test_pictures_are_drawn(result, tmp_path):
    other = result.model_copy(update={"config": result.config.model_copy(update={"tp": 2, "model": "other"})})
    files = plot_refits([result, other], tmp_path / "plots")
    assert [file.name for file in files] == ["phases.png", "comparison.png", "roofline.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000 for file in files)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"engine": "nothing"}, "no adapter is called 'nothing'"),
        ({"model": "no-such-shape"}, "neither a folder with a config.json nor one of the shapes tiny"),
        ({"strategies": ("teleport",)}, "no strategy teleport; it has eager"),
        ({"tp": 2}, "transformers runs on one rank, not on 2"),
        ({"online": True}, "transformers does not quantize BF16 weights to block FP8 itself; leave out --online"),
    ],
)
def test_what_cannot_be_measured_is_refused(changed, message):
    with pytest.raises(UnsupportedEngineError, match=message):
        run_refit_bench(RefitBenchConfig(**TINY | changed))


def bench_with(model, update) -> _Bench:
    """A benchmark of a fake engine with one other way to take weights."""
    strategy = Strategy(name="other", summary="", update=lambda policy: update(model, policy))
    engine = SimpleNamespace(candidate=model, settings={}, strategies=[strategy], worker=model, close=lambda: None)
    return _Bench(RefitBenchConfig(engine="fake", model="fake", rounds=4), engine, lambda *_: None)


def fill_with_ones(model):
    for slot in model.slots():
        slot.weight.view(torch.uint8).fill_(1)
        if slot.scale is not None:
            slot.scale.fill_(1)


@pytest.mark.parametrize(
    ("update", "is_repeatable"),
    [
        (lambda model, _: fill_with_ones(model), True),
        (lambda model, _: model.embed.add_(1), False),
    ],
    ids=["its own bytes", "other bytes every time"],
)
def test_wrong_bytes_of_another_way_are_told(update, is_repeatable, model):
    result = bench_with(model, update).run()
    (other,) = result.others
    assert result.is_repeatable
    assert not other.equals_ours
    assert other.is_repeatable is is_repeatable


@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
@pytest.mark.parametrize("shape", [(256, 128), (130, 200)])
def test_eager_quantization_gives_the_same_scales_and_nearly_the_same_codes(shape, scale_format):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    codes, scale = eager_quantize(weight, BlockFormat(scale_format=scale_format))
    expected_codes, expected_scale = quantize_blockwise(weight, scale_format=str(scale_format))
    assert torch.equal(scale, expected_scale)
    assert (codes.view(torch.uint8) != expected_codes.view(torch.uint8)).float().mean() < 1e-3


def test_an_eager_checkpoint_is_one_that_a_refit_takes(tmp_path):
    write_config("tiny", tmp_path)
    refitter = Refitter(open_bench_engine("transformers", RefitBoot(model=tmp_path)).candidate)
    layout = refitter.layout()
    policy = policies.fill(policies.allocate(layout, torch.device("cpu")), 1)
    refitter.refit(policy)
    expected = refitter.fingerprints()
    refitter.refit(policies.fill(policies.allocate(layout, torch.device("cpu")), 2))
    assert refitter.fingerprints() != expected
    refitter.refit(eager_checkpoint(layout, policy))
    assert refitter.fingerprints() == expected


def policy_of(shape):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SHAPES[shape])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).state_dict()


@pytest.mark.parametrize(
    ("shape", "billions"),
    [("qwen3-0.6b", 0.75), ("qwen3-4b", 4.41), ("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.53), ("llama-3.1-8b", 8.03)],
)
def test_named_shapes_have_the_sizes_of_what_they_are_named_after(shape, billions):
    """With the LM head counted, tied or not."""
    num_weights = sum(tensor.numel() for tensor in policy_of(shape).values()) / 1e9
    assert num_weights == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_one_that_transformers_knows(shape, tmp_path):
    from transformers import AutoConfig

    write_config(shape, tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).architectures == SHAPES[shape]["architectures"]
    assert policy_of(shape)


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ("qwen3-8b", []),
        ("tiny-moe", [0, 1]),
        ("deepseek-v3-4layers", [3]),
    ],
)
def test_routers_stay_as_they_are(shape, layers, tmp_path):
    write_config(shape, tmp_path)
    expected = [f"model.layers.{layer}.mlp.gate" for layer in layers]
    assert block_fp8(tmp_path)["modules_to_not_convert"] == expected
    modules = {name.removesuffix(".weight") for name in policy_of(shape)}
    assert modules >= set(expected)


def test_percentiles_are_of_what_was_measured():
    found = Percentiles.of([5, 1, 3, 2, 4, 6, 7, 8, 9, 10])
    assert (found.median, found.p90, found.min, found.max, found.count) == (5.5, 9, 1, 10, 10)
    assert Percentiles.of([2.0]).p90 == 2.0
