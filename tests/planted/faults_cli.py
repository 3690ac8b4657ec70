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
        path="fp8refit/cli/guards.py",
        before="        if handler != signal.SIG_IGN:\n",
        after="        if number == signal.SIGINT:\n",
        found_by=QUANTIZE,
    ),
    Fault(
        name="quantize into the current folder fails after the work",
        path="fp8refit/checkpoint/whole_folder.py",
        before="    is_new = not dst.exists()\n",
        after='    dst, is_new = Path(__import__("os").path.relpath(dst)), True\n',
        found_by=QUANTIZE,
    ),
    Fault(
        name="quantize to a link fails after the work",
        path="fp8refit/checkpoint/whole_folder.py",
        before="        place = dst.resolve()\n",
        after="        place = dst.absolute()\n",
        found_by=QUANTIZE,
    ),
    Fault(
        name="a full disk is a raw error",
        path="fp8refit/checkpoint/whole_folder.py",
        before="        yield\n    except (OSError, SafetensorError) as error:\n",
        after="        yield\n    except ZeroDivisionError as error:\n",
        found_by=QUANTIZE,
    ),
    Fault(
        name="quantize leaves the folders above what it could not write",
        path="fp8refit/checkpoint/whole_folder.py",
        before="                parent.rmdir()\n",
        after="                pass\n",
        found_by=QUANTIZE,
    ),
    Fault(
        name="files of a quantize that is interrupted stay in a folder that was there",
        path="fp8refit/checkpoint/whole_folder.py",
        before="            (dst / file.name).unlink(missing_ok=True)\n",
        after="            pass\n",
        found_by=QUANTIZE,
    ),
    Fault(
        name="a matrix of integers is a raw error of the quantizer",
        path="fp8refit/checkpoint/quantize.py",
        before="    check_quantizable(outputs)\n",
        after="",
        found_by=QUANTIZE,
    ),
    Fault(
        name="a checkpoint without values is a raw error",
        path="fp8refit/checkpoint/outputs.py",
        before="        if not shards or num_bytes + ",
        after="        if num_bytes + ",
        found_by=QUANTIZE,
    ),
    Fault(
        name="a layout may name any attribute of torch as a dtype",
        path="fp8refit/live/layout.py",
        before="        if name not in _DTYPES:\n",
        after="        if False:\n",
        found_by=QUANTIZE,
    ),
    Fault(
        name="a config that is no Unicode is a raw error",
        path="fp8refit/checkpoint/quantize.py",
        before="    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, or no Unicode\n",
        after="    except (OSError, json.JSONDecodeError) as error:\n",
        found_by=QUANTIZE,
    ),
    Fault(
        name="a model that an engine does not know is a raw error",
        path="fp8refit/driver/adapters.py",
        before='    except Exception as error:\n        raise UnsupportedEngineError(f"{engine} cannot ',
        after='    except ZeroDivisionError as error:\n        raise UnsupportedEngineError(f"{engine} cannot ',
        found_by=INSPECT,
    ),
    Fault(
        name="inspect cuts names on 80 columns",
        path="fp8refit/cli/show_layout.py",
        before="    if Measurement.get(console, console.options.update(max_width=WIDE), table).maximum <= console.width:\n",
        after="    if True:\n",
        found_by=INSPECT,
    ),
    Fault(
        name="bench takes sides, batches and repeats of zero and less",
        path="fp8refit/bench/clock.py",
        before="Field(ge=1, le=1 << 24)",
        after="Field(le=1 << 24)",
        found_by=f"{KERNEL} {ROLLOUT}",
    ),
    Fault(
        name="bench takes dtypes that are none",
        path="fp8refit/bench/kernel.py",
        before='tuple[Literal["bfloat16", "float16", "float32"], ...]',
        after="tuple[str, ...]",
        found_by=KERNEL,
    ),
    Fault(
        name="bench takes devices that are none",
        path="fp8refit/cli/bench_commands.py",
        before='    kind, _, index = text.partition(":")\n',
        after='    return torch.device(text)\n    kind, _, index = text.partition(":")\n',
        found_by=KERNEL,
    ),
    Fault(
        name="bench rolls out with ids of no vocabulary",
        path="fp8refit/bench/rollout.py",
        before="        _check_vocabulary(model)\n",
        after="",
        found_by=ROLLOUT,
    ),
    Fault(
        name="push takes any wait, and says nothing of the option",
        path="fp8refit/config.py",
        before="    timeout_s: float = Field(default=300.0, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)\n",
        after="    timeout_s: float = Field(default=300.0, gt=0)\n",
        found_by=PUSH,
    ),
    Fault(
        name="demo trains before it looks where to write",
        path="fp8refit/cli/commands.py",
        before='    make_folder(out, "--out")\n',
        after="",
        found_by=DEMO,
    ),
]
