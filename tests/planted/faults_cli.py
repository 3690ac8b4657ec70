"""Faults of the command line and of what it writes."""

from tests.planted.fault import Fault

FUZZER = "tests/fuzz/test_cli.py"
QUANTIZE = f"{FUZZER}::test_quantize_is_whole_or_leaves_nothing"
INSPECT = f"{FUZZER}::test_inspect_shows_a_layout_or_says_why_not"
KERNEL = f"{FUZZER}::test_bench_kernel_measures_or_says_why_not"
PUSH = f"{FUZZER}::test_push_reaches_the_server_or_says_why_not"
DEMO = f"{FUZZER}::test_demo_takes_options_that_are_good_before_it_trains"
ROLLOUT = f"{FUZZER}::test_bench_rollout_measures_or_says_why_not"

FAULTS = [
    Fault(
        name="SIGTERM leaves quantize's temporary folder",
        at="fp8refit/cli/guards.py::ended_in_order",
        before="handler != signal.SIG_IGN",
        after="number == signal.SIGINT",
        found_by=QUANTIZE,
    ),
    Fault(
        name="quantize into the current folder fails after the work",
        at="fp8refit/checkpoint/whole_folder.py::becoming",
        before="is_new = not dst.exists()",
        after='dst, is_new = Path(__import__("os").path.relpath(dst)), True',
        found_by=QUANTIZE,
    ),
    Fault(
        name="quantize to a link fails after the work",
        at="fp8refit/checkpoint/whole_folder.py::free_place",
        before="dst.resolve()",
        after="dst.absolute()",
        found_by=QUANTIZE,
    ),
    Fault(
        name="a full disk is a raw error",
        at="fp8refit/checkpoint/whole_folder.py::naming",
        before="(OSError, SafetensorError)",
        after="ZeroDivisionError",
        found_by=QUANTIZE,
    ),
    Fault(
        name="quantize leaves the folders above what it could not write",
        at="fp8refit/checkpoint/whole_folder.py::becoming",
        before="parent.rmdir()",
        found_by=QUANTIZE,
    ),
    Fault(
        name="files of a quantize that is interrupted stay in a folder that was there",
        at="fp8refit/checkpoint/whole_folder.py::_move_files",
        before="(dst / file.name).unlink(missing_ok=True)",
        found_by="tests/checkpoint/test_quantize.py"
        "::test_an_interrupt_while_files_move_into_a_folder_that_was_there_leaves_nothing_behind",
    ),
    Fault(
        name="a matrix of integers is a raw error of the quantizer",
        at="fp8refit/checkpoint/quantize.py::quantize_checkpoint",
        before="check_quantizable(outputs)",
        found_by=QUANTIZE,
    ),
    Fault(
        name="a checkpoint without values is a raw error",
        at="fp8refit/checkpoint/outputs.py::plan_shards",
        before="not shards or num_bytes + output.num_bytes > max_shard_bytes",
        after="num_bytes + output.num_bytes > max_shard_bytes",
        found_by=QUANTIZE,
    ),
    Fault(
        name="a layout may name any attribute of torch as a dtype",
        at="fp8refit/live/layout.py::SlotLayout._is_a_dtype",
        before="name not in _DTYPES",
        after="False",
        found_by=QUANTIZE,
    ),
    Fault(
        name="a config that is no Unicode is a raw error",
        at="fp8refit/checkpoint/quantize.py::_read_config",
        before="(OSError, ValueError, RecursionError)",
        after="(OSError, json.JSONDecodeError)",
        found_by=QUANTIZE,
    ),
    Fault(
        name="a model that an engine does not know is a raw error",
        at="fp8refit/driver/adapters.py::booting",
        before="try:\n    ...\nexcept RefitError:\n    ...\nexcept Exception as error:\n    ...",
        after="try:\n    ...\nexcept RefitError:\n    ...\nexcept ZeroDivisionError as error:\n    ...",
        found_by=INSPECT,
    ),
    Fault(
        name="inspect cuts names on 80 columns",
        at="fp8refit/cli/show_layout.py::_show_slots",
        before="Measurement.get(console, console.options.update(max_width=WIDE), table).maximum <= console.width",
        after="True",
        found_by=INSPECT,
    ),
    Fault(
        name="bench takes sides, batches and repeats of zero and less",
        at="fp8refit/bench/clock.py",
        before="Field(ge=1, le=1 << 24)",
        after="Field(le=1 << 24)",
        found_by=f"{KERNEL} {ROLLOUT}",
    ),
    Fault(
        name="bench takes dtypes that are none",
        at="fp8refit/bench/kernel.py::KernelBenchConfig",
        before='Literal["bfloat16", "float16", "float32"]',
        after="str",
        found_by=KERNEL,
    ),
    Fault(
        name="bench takes devices that are none",
        at="fp8refit/cli/bench_commands.py::_read_device",
        before='kind, _, index = text.partition(":")',
        after='return torch.device(text)\nkind, _, index = text.partition(":")',
        found_by=KERNEL,
    ),
    Fault(
        name="bench rolls out with ids of no vocabulary",
        at="fp8refit/bench/rollout.py::run_rollout_bench",
        before="_check_vocabulary(model)",
        found_by=ROLLOUT,
    ),
    Fault(
        name="push takes any wait, and says nothing of the option",
        at="fp8refit/config.py::RefitConfig",
        before="Field(default=300.0, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)",
        after="Field(default=300.0, gt=0)",
        found_by=PUSH,
    ),
    Fault(
        name="demo trains before it looks where to write",
        at="fp8refit/cli/commands.py::demo",
        before='make_folder(out, "--out")',
        found_by=DEMO,
    ),
]
