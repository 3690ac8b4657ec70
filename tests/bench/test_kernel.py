import json

import pytest
import torch
from typer.testing import CliRunner

from fp8refit.bench import KernelBenchConfig, run_kernel_bench
from fp8refit.cli import app
from fp8refit.errors import UnsupportedEngineError

CPU = torch.device("cpu")


def test_every_case_is_timed_beside_the_copy_rate():
    config = KernelBenchConfig(shapes=((256, 384), (130, 100)), repeats=3, min_bytes=1 << 18)
    steps = []
    result = run_kernel_bench(config, device=CPU, on_progress=lambda *step: steps.append(step))
    assert len(result.timings) == 2 * 2 * 3 == len(steps) - 1
    first = result.timings[0]
    assert (first.shape, first.dtype, str(first.scale_format)) == ((256, 384), "bfloat16", "fp32")
    assert first.num_matrices == 1 and first.num_bytes == 256 * 384 * 3 + 4 * 2 * 3
    assert first.gb_per_s == pytest.approx(first.num_bytes / first.device_us.median / 1e3)
    assert first.fraction_of_copy == pytest.approx(first.gb_per_s / result.copy_gb_per_s)
    assert result.timings[6].num_matrices == 7


def test_the_command_line_times_the_reference_on_a_cpu():
    arguments = ["bench", "kernel", "--device", "cpu", "--shapes", "128x128", "--dtypes", "bfloat16", "--repeats", "3"]
    ran = CliRunner().invoke(app, [*arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert [timing["shape"] for timing in found["timings"]] == [[128, 128]] * 3
    again = CliRunner().invoke(app, [*found["command"].split()[1:], "--json"])
    assert json.loads(again.stdout)["config"] == found["config"]
    assert "of copy" in CliRunner().invoke(app, arguments).stdout


@pytest.mark.parametrize("shapes", ["128", "128x", "axb"])
def test_matrices_that_are_none_are_refused(shapes):
    ran = CliRunner().invoke(app, ["bench", "kernel", "--device", "cpu", "--shapes", shapes])
    assert ran.exit_code == 2
    assert "not a list of matrices" in ran.output


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--shapes", "0x0"),
        ("--shapes", "-1x4"),
        ("--shapes", ""),
        ("--dtypes", "int8"),
        ("--dtypes", ""),
        ("--device", "foo"),
        ("--device", "meta"),
        ("--repeats", "0"),
        ("--repeats", "9" * 30),
    ],
)
def test_options_that_are_none_are_named(option, value):
    ran = CliRunner().invoke(app, ["bench", "kernel", "--device", "cpu", option, value, "--json"])
    assert ran.exit_code == 2, ran.exception
    assert option in ran.stderr and ran.stdout == ""


def test_a_matrix_without_room_is_refused():
    with pytest.raises(UnsupportedEngineError, match="16777216x16777216: 1 x bfloat16 does not fit"):
        run_kernel_bench(KernelBenchConfig(shapes=((1 << 24, 1 << 24),)), device=CPU)


def test_small_matrices_are_repeated_no_longer_than_that():
    (timing,) = run_kernel_bench(
        KernelBenchConfig(shapes=((1, 1),), dtypes=("bfloat16",), scale_formats=("fp32",), repeats=3), device=CPU
    ).timings
    assert timing.num_matrices == 1024


def test_a_dtype_that_cannot_be_quantized_is_refused():
    with pytest.raises(ValueError, match="'bfloat16', 'float16' or 'float32'"):
        KernelBenchConfig(dtypes=("int8",))


def test_a_gpu_is_asked_for_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    ran = CliRunner().invoke(app, ["bench", "kernel"])
    assert ran.exit_code == 2
    assert "--device cpu" in ran.output
