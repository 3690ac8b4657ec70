"""Command lines: what succeeds is whole, what does not says why without a traceback, and nothing temporary stays."""

import contextlib
import gc
import json
import logging
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import event, example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fp8refit.bench import KernelBenchResult, RefitBenchResult, RolloutBenchResult, clock, kernel
from fp8refit.checkpoint import CheckpointReport, PushResult, outputs, quantize, whole_folder
from fp8refit.cli import commands as cli
from fp8refit.kernels.reference import quantize_reference
from fp8refit.live.formats import FLOAT_SCALES, BlockFormat, ScaleFormat
from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.live.slots import SCALE_SUFFIX, dtype_name
from tests.fake_server import URL, Running, entry_point_of

LINEARS = [
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.experts.3.w1.weight",
    "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
]
KEPT = ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.gate.weight", "lm_head.weight"]
MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 640,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
NO_CONFIGS = [None, b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000]
"""None: there is no such file."""
ODD_VALUES = st.sampled_from([None, -1, 0, 1.5, "", "x", [], {}, True])
ODD_NUMBERS = ["0", "-1", "x", "", "1.5", "nan", "inf", "1e12", "9" * 30]


class World:
    """A folder in which one command runs, and one for temporary files, which has to be empty afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "world"
        self.temporary = folder / "temporary"
        self.folder.mkdir()
        self.temporary.mkdir()

    def read(self, *, without: Path | None = None) -> dict[str, object]:
        """Every file, folder and link, but those of one folder."""
        found: dict[str, object] = {}
        for path in sorted(self.folder.rglob("*")):
            if without is None or not (path == without or path.is_relative_to(without)):
                is_file = path.is_file() and not path.is_symlink()
                found[str(path.relative_to(self.folder))] = path.read_bytes() if is_file else path.lstat().st_mode
        return found

    def run(self, *arguments: object, cwd: Path | None = None):
        with contextlib.chdir(cwd or self.folder), mock.patch.object(tempfile, "tempdir", str(self.temporary)):
            result = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exc_info)
        assert "Traceback" not in result.stderr
        assert not [path for path in self.temporary.iterdir() if "inductor" not in path.name], arguments
        if result.exit_code in (1, 2):
            assert result.stderr.strip(), arguments
        event(f"{arguments[0]} exits with {result.exit_code}")
        return result


@contextlib.contextmanager
def a_world():
    with tempfile.TemporaryDirectory() as folder:
        yield World(Path(folder).resolve())


def show(problem: object) -> bytes:
    return problem if isinstance(problem, bytes) else json.dumps(problem).encode()


# quantize


@st.composite
def tensors(draw):
    """Name to tensor, mostly such that they can be quantized."""
    names = draw(st.lists(st.sampled_from(LINEARS), unique=True, max_size=3))
    names += draw(st.lists(st.sampled_from(KEPT), unique=True, max_size=2))
    sides = st.sampled_from([1, 3, 128, 129, 200, 0])
    found = {}
    for name in names:
        dtype = draw(st.sampled_from([torch.bfloat16] * 4 + [torch.float16, torch.float32, torch.int64]))
        shape = [draw(sides) for _ in range(1 if "norm" in name else 2)]
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        found[name] = (torch.randn(shape, generator=generator) * draw(st.sampled_from([1, 0, 1e-6, 60]))).to(dtype)
    bad = draw(st.sampled_from([None] * 9 + [torch.nan, torch.inf]))
    if bad is not None and names:
        tensor = found[draw(st.sampled_from(names))]
        if tensor.numel() and tensor.is_floating_point():
            tensor.view(-1)[-1] = bad
    return found


def is_linear(name: str) -> bool:
    return name in LINEARS


def expected(weights, block_format):
    """What the result holds, by the specification; None if there can be none."""
    found = {}
    if not any(map(is_linear, weights)) or any(
        is_linear(name) and not w.is_floating_point() for name, w in weights.items()
    ):
        return None
    for name, weight in weights.items():
        weight = weight.to(torch.bfloat16) if weight.dtype is torch.float32 else weight
        if not torch.isfinite(weight).all():
            return None
        if not is_linear(name):
            found[name] = weight
        elif weight.numel():
            found[name], found[name + SCALE_SUFFIX], _ = quantize_reference(weight, block_format)
        else:
            found[name] = weight.to(torch.float8_e4m3fn)
            found[name + SCALE_SUFFIX] = torch.empty(block_format.scale_shape(weight.shape))
    return found


def layout_of(weights, block_format):
    """An engine that holds these tensors."""
    slots = [
        SlotLayout(
            name=name,
            module="m",
            full_shape=tuple(weight.shape),
            shape=tuple(weight.shape),
            offset=(0,) * weight.ndim,
            dtype="float8_e4m3fn" if is_linear(name) else dtype_name(weight.dtype).replace("float32", "bfloat16"),
            scale_format=block_format.scale_format if is_linear(name) else None,
            block_size=block_format.block_size if is_linear(name) else None,
            kernel="Kernel",
        )
        for name, weight in weights.items()
    ]
    return EngineLayout(engine="fake", versions={}, device="cpu", slots=tuple(slots), aliases={}, refusals=())


NEW = ["new", "far/away/new", "empty", ".", "link", "dangling", "src/inside"]
TAKEN = ["file", "full", "src", "file/under", "loop", "link-to-file", "n" * 300, "full/../full"]


def prepare_places(world: World) -> None:
    """What the destinations of `NEW` and `TAKEN` find."""
    for name in ("empty", "full", "behind"):
        (world.folder / name).mkdir()
    (world.folder / "full" / "thing").write_text("mine")
    (world.folder / "file").write_text("mine")
    links = {"link": "behind", "dangling": "nowhere", "loop": "loop", "link-to-file": "file"}
    for name, target in links.items():
        (world.folder / name).symlink_to(target)


@contextlib.contextmanager
def files_end_at(num_bytes):
    """No file can grow longer: the kernel's error of a full disk, for this process alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if num_bytes is None else num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITERS = {module.__file__ for module in (quantize, outputs, whole_folder)}


@contextlib.contextmanager
def interrupted(number, step):
    """This process gets a signal at one of the steps of `WRITERS` and what they call; gives a list that is filled if so.

    What comes where the command does not look for it is kept, and would have killed the process.
    """
    sent, killed, steps = [], [], 0

    def at_step(frame, kind, argument):
        nonlocal steps
        if any(each is not None and each.f_code.co_filename in WRITERS for each in (frame, frame.f_back)):
            steps += 1
            if steps == step:
                sent.append(number)
                os.kill(os.getpid(), number)

    before = {each: signal.signal(each, lambda *_: killed.append(number)) for each in (signal.SIGTERM, signal.SIGHUP)}
    # A job in a shell's background is started with it ignored.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    if number is not None:
        sys.setprofile(at_step)
    try:
        yield sent
    finally:
        sys.setprofile(None)
        for each, handler in before.items():
            signal.signal(each, handler)
    assert not killed


WHOLE = {
    "weights": {LINEARS[0]: torch.linspace(-3, 3, 200 * 129).view(200, 129), "model.norm.weight": torch.ones(129)},
    "config": {},
    "place": "new",
    "like": None,
    "odd": ("dtype", "x"),
    "form": ScaleFormat.FP32,
    "block_size": (128, 128),
    "limit": None,
    "stop": (None, 0),
    "as_json": True,
}
"""What succeeds."""
BROKEN = [
    *({"limit": limit} for limit in (100, 1000, 20_000)),
    *(
        {"stop": (number, step)}
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        for step in (330, 450, 602)
    ),
    *({"place": "empty", "stop": (signal.SIGTERM, step)} for step in range(600, 760, 11)),
    *(
        {"like": "odd", "odd": odd}
        for odd in [("dtype", "x"), ("dtype", "nn"), ("block_size", [0, 128]), ("full_shape", [])]
    ),
    {"like": "other tensors"},
    {"weights": {LINEARS[0]: torch.tensor([[torch.nan]])}},
    {"weights": {LINEARS[0]: torch.ones(3, 0, dtype=torch.bfloat16)}},
    {"weights": {LINEARS[0]: torch.ones(3, 3, dtype=torch.int64)}},
    *({"config": config} for config in NO_CONFIGS),
]
"""What is different where it does not, or may not."""


def cases(test):
    """Decorates a test: it is also run with every place, and with everything that is broken at a place that is made for it."""
    for place in NEW + TAKEN:
        test = example(**WHOLE | {"place": place})(test)
    for index, changed in enumerate(BROKEN):
        test = example(**WHOLE | {"place": NEW[index % len(NEW)]} | changed)(test)
        if "place" not in changed:
            test = example(**WHOLE | {"place": "far/away/new"} | changed)(test)
    return test


@cases
@given(
    weights=tensors(),
    config=st.sampled_from([{}] * 9 + [{"quantization_config": {}}, *NO_CONFIGS]),
    place=st.sampled_from(NEW * 2 + TAKEN),
    like=st.sampled_from([None, None, "good", "other tensors", "odd", b"", b"{}", b"\xff", "no file"]),
    odd=st.tuples(st.sampled_from(["block_size", "dtype", "full_shape", "name", "scale_format"]), ODD_VALUES),
    form=st.sampled_from([*ScaleFormat, *FLOAT_SCALES, "fp16", ""]),
    block_size=st.sampled_from([(128, 128), (64, 32), (1, 1)]),
    limit=st.sampled_from([None, None, None, 100, 1000, 20_000]),
    stop=st.tuples(st.sampled_from([None, None, signal.SIGTERM, signal.SIGHUP, signal.SIGINT]), st.integers(1, 800)),
    as_json=st.booleans(),
)
def test_quantize_is_whole_or_leaves_nothing(weights, config, place, like, odd, form, block_size, limit, stop, as_json):
    with a_world() as world:
        prepare_places(world)
        src = world.folder / "src"
        src.mkdir()
        save_file(weights, src / "model.safetensors")
        if config is not None:
            (src / "config.json").write_bytes(show(config))
        (src / "tokenizer.json").write_text("{}")
        options = ["--scale-format", form, *(["--json"] if as_json else [])]
        is_known = form in FLOAT_SCALES
        sizes = {"block_size": block_size} if like is not None else {}
        block_format = BlockFormat(scale_format=ScaleFormat(form) if is_known else ScaleFormat.FP32, **sizes)
        if like is not None:
            layout = json.loads(layout_of(weights, block_format).model_dump_json())
            if like == "other tensors":
                layout["slots"] = [slot | {"name": slot["name"] + "s"} for slot in layout["slots"]] or [{}]
            elif like == "odd":
                layout["slots"] = [slot | dict([odd]) for slot in layout["slots"]]
            if like != "no file":
                (world.folder / "layout.json").write_bytes(show(like if isinstance(like, bytes) else layout))
            options += ["--like", "../layout.json" if place == "." else "layout.json"]
        before = world.read()
        cwd = world.folder / "empty" if place == "." else world.folder
        number = stop[0]
        with interrupted(*stop) as sent, files_end_at(limit):
            result = world.run("quantize", "../src" if place == "." else "src", place, *options, cwd=cwd)
        if sent:
            # What a signal between two bytecodes of a `with` left open is closed with its frames, as at the end of a process.
            result.exc_info = result.exception = None
            gc.collect()
        dst = (cwd / place).resolve() if place not in TAKEN else world.folder / "no such folder"

        wanted = expected(weights, block_format)
        is_good = is_known and wanted is not None and config == {} and place in NEW and like in (None, "good")
        is_written = (dst / "config.json").exists()
        if not is_written:
            assert world.read() == before
        else:
            parts = {place.split("/")[0]} | {str(parent) for parent in Path(place).parents} | {"nowhere"}
            assert {k: v for k, v in world.read(without=dst).items() if k not in parts} == {
                k: v for k, v in before.items() if k not in parts and not (world.folder / k).is_relative_to(dst)
            }
            assert_is(dst, wanted)
        if sent:
            assert result.exit_code in {128 + number, 130} or (result.exit_code == 1 and number == signal.SIGINT)
            return
        assert (result.exit_code == 0) == is_written
        assert result.exit_code in (0, 2)
        if like != "odd" and limit is None:
            assert is_written == is_good, result.output
        if result.exit_code == 0 and as_json:
            report = CheckpointReport.model_validate_json(result.stdout)
            assert report.num_quantized == sum(map(is_linear, weights))
        elif result.exit_code != 0:
            assert result.stdout == ""


def assert_is(folder, wanted):
    """Every byte is there, and found by the index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in set(index.values()):
        found |= load_file(folder / file)
    assert index.keys() == found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert not tensor.numel() or torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    names = {"config.json", "tokenizer.json", "model.safetensors.index.json", *index.values()}
    assert {path.name for path in folder.iterdir()} == names


# inspect and bench, on models that transformers makes


@st.composite
def models(draw):
    """What stands in config.json, and whether a model comes of it for sure (True), for sure not (False) or perhaps (None)."""
    if draw(st.booleans()):
        return MODEL, True
    kind = draw(st.sampled_from(["no config", "unknown", "changed", "absent"]))
    if kind == "no config":
        return draw(st.sampled_from(NO_CONFIGS)), False
    if kind == "unknown":
        return {"model_type": draw(st.sampled_from(["nope", "", None, 5, []]))}, False
    name = draw(st.sampled_from(sorted(MODEL)))
    if kind == "absent":
        return {key: value for key, value in MODEL.items() if key != name and key != "model_type"}, False
    return MODEL | {name: draw(ODD_VALUES)}, None


def write_model(world: World, config: object) -> str:
    (world.folder / "model").mkdir()
    if config is not None:
        (world.folder / "model" / "config.json").write_bytes(show(config))
    return "model"


@given(
    model=models(),
    path=st.sampled_from(["model", "model", "model", "absent", "model/config.json", "", "n" * 300]),
    engine=st.sampled_from(["transformers"] * 4 + ["nothing", ""]),
    as_json=st.booleans(),
)
def test_inspect_shows_a_layout_or_says_why_not(model, path, engine, as_json):
    config, is_model = model
    with a_world() as world:
        write_model(world, config)
        result = world.run("inspect", path, "--engine", engine, *(["--json"] if as_json else []))
        assert result.exit_code in (0, 2)
        if path != "model" or engine != "transformers" or is_model is not None:
            assert (result.exit_code == 0) == bool(path == "model" and engine == "transformers" and is_model)
        if result.exit_code != 0:
            assert result.stdout == ""
        elif as_json:
            assert EngineLayout.model_validate_json(result.stdout).slots
        else:
            assert "model.layers.0.self_attn.q_proj.weight" in result.stdout.splitlines()


class Options:
    """Options of a command, each with good values and odd ones; None leaves it out."""

    def __init__(self, *choices: tuple[str, list[str | None], list[str]]) -> None:
        self.choices = choices

    def drawn(self):
        """Options with values, and which of them has an odd one, if any."""

        @st.composite
        def options(draw):
            odd = draw(st.sampled_from([None, *(name for name, _, _ in self.choices)]))
            values = {name: draw(st.sampled_from(bad if name == odd else good)) for name, good, bad in self.choices}
            return self.written(values), odd

        return options()

    def every_odd_value(self, **others):
        """Decorates a test: it is also run with each odd value beside the first good ones."""

        def decorate(test):
            for odd, _, values in self.choices:
                for value in values:
                    chosen = {name: value if name == odd else good[0] for name, good, _ in self.choices}
                    test = example(chosen=(self.written(chosen), odd), **others)(test)
            return test

        return decorate

    def first(self):
        """The first good values."""
        return self.written({name: good[0] for name, good, _ in self.choices})

    @staticmethod
    def written(values):
        return [word for name, value in values.items() if value is not None for word in (name, value)]


REFIT = Options(
    ("--model", ["model"], ["absent", "model/config.json", "", "n" * 300]),
    ("--engine", ["transformers"], ["nothing", ""]),
    ("--rounds", ["1", "2"], ODD_NUMBERS),
    ("--warm-up", ["0", "1"], [number for number in ODD_NUMBERS if number not in ("0", "9" * 30)]),
    ("--tp", ["1"], [*ODD_NUMBERS, "2"]),
    ("--seed", ["0", "4294967295", None], [number for number in ODD_NUMBERS if number != "0"]),
    ("--strategies", ["none", "eager", None], ["teleport", ""]),
    ("--plot", [None, "plots", "far/away"], ["file", "file/under"]),
)
ROLLOUT = Options(
    ("--model", ["model"], ["absent", "model/config.json", ""]),
    ("--engine", ["transformers"], ["nothing", ""]),
    ("--precisions", ["bf16", "fp8,bf16", "fp8+kv"], ["", "fp4", "bf16,,fp8"]),
    ("--batch-sizes", ["1", "2,1"], [*ODD_NUMBERS, "1,", "1,0"]),
    ("--context-lengths", ["1", "3,2"], [*ODD_NUMBERS, "1,", "1,-1"]),
    ("--new-tokens", ["1", "2"], ODD_NUMBERS),
    ("--cases", [None, "1x2+1", "2x1+2,1x3+1"], ["", "1x2", "1x2+0", "0x1+1", "1x1+1,", "axb+c", "1x-1+1", "9" * 30]),
    ("--repeats", ["1"], ODD_NUMBERS),
    ("--case-seconds", [None, "0.5"], ["0", "-1", "nan", "", "soon"]),
    ("--seed", ["0", None], [number for number in ODD_NUMBERS if number != "0"]),
    ("--set", [None], ["a=1", "a", "=1", "a=", "a=b", "1=1", "model=1"]),
)
KERNEL = Options(
    (
        "--shapes",
        ["1x1", "130x7,2x3"],
        ["0x0", "-1x4", "4x0", "4x", "x", "", "4", "axb", "1x2x3", "1x1,", "9" * 30 + "x1"],
    ),
    ("--dtypes", ["bfloat16", "float32,float16", None], ["", "int8", "float64", "bfloat16,", "nn"]),
    ("--device", ["cpu"], ["", "foo", "meta", "cpu:1", "mps", "cuda:x", "cuda:", "cuda:99", "cuda:-1"]),
    ("--repeats", ["3", None], [*ODD_NUMBERS, "2"]),
)


@pytest.fixture(autouse=True, scope="module")
def loggers_outlive_their_streams():
    """Those of transformers keep the standard error of the first command in this process, which is closed by then."""
    with mock.patch.object(logging, "raiseExceptions", False):
        yield


@pytest.fixture(autouse=True, scope="module")
def small_copies():
    """What is measured means nothing here."""
    with mock.patch.dict(clock._COPY_BYTES, cpu=1 << 16), mock.patch.object(kernel, "_MOST_MATRICES", 2):
        yield


def assert_named(odd, result):
    """Whoever gave a value that is none is told which option it was."""
    if odd not in {None, "--engine", "--model", "--tp", "--strategies", "--set", "--to", "--device"}:
        assert odd in result.stderr, result.stderr


def bench(world, command, chosen, kind, *, is_good, as_json):
    options, odd = chosen
    (world.folder / "file").write_text("mine")
    result = world.run("bench", command, *options, *(["--json"] if as_json else []))
    assert result.exit_code in (0, 2)
    if is_good is not None or odd is not None:
        assert (result.exit_code == 0) == (odd is None and is_good), (options, result.output)
    assert_named(odd, result)
    if result.exit_code != 0:
        assert result.stdout == ""
    elif as_json:
        assert kind.model_validate_json(result.stdout).model_dump_json() + "\n" == result.stdout
    return result


@REFIT.every_odd_value(model=(MODEL, True), as_json=True)
@given(chosen=REFIT.drawn(), model=models(), as_json=st.booleans())
def test_bench_refit_measures_or_says_why_not(chosen, model, as_json):
    with a_world() as world:
        write_model(world, model[0])
        bench(world, "refit", chosen, RefitBenchResult, is_good=model[1], as_json=as_json)


FEW_IDS = MODEL | {"vocab_size": 64}


@ROLLOUT.every_odd_value(model=(MODEL, True), as_json=True)
@example(chosen=(ROLLOUT.first(), None), model=(FEW_IDS, False), as_json=True)
@example(chosen=(ROLLOUT.first(), None), model=(MODEL | {"hidden_size": 0}, None), as_json=True)
@given(chosen=ROLLOUT.drawn(), model=models(), as_json=st.booleans())
def test_bench_rollout_measures_or_says_why_not(chosen, model, as_json):
    with a_world() as world:
        write_model(world, model[0])
        result = bench(world, "rollout", chosen, RolloutBenchResult, is_good=model[1], as_json=as_json)
        if model[0] == FEW_IDS and chosen == (ROLLOUT.first(), None):
            assert "has a vocabulary of 64" in result.stderr, "found before anything boots"


@KERNEL.every_odd_value(as_json=True)
@given(chosen=KERNEL.drawn(), as_json=st.booleans())
def test_bench_kernel_measures_or_says_why_not(chosen, as_json):
    with a_world() as world:
        bench(world, "kernel", chosen, KernelBenchResult, is_good=True, as_json=as_json)


# push


PUSH = Options(
    (
        "--to",
        [URL, URL + "/"],
        ["", "x", "http://", "http://[::1", "http://fake:99999", "ftp://fake", "http://other:1"],
    ),
    (
        "--timeout-s",
        ["0.5", "20", None],
        [*(number for number in ODD_NUMBERS if number != "1.5"), "-inf", "1e400", "0.01"],
    ),
    ("--in-flight", ["wait", "abort", "keep", None], ["", "drop"]),
    ("--transport", ["auto", None], ["", "pigeon"]),
    ("--host", [None], ["127.0.0.1", ""]),
)


@PUSH.every_odd_value(what="policy", as_json=True)
@given(
    chosen=PUSH.drawn(),
    what=st.sampled_from(["policy"] * 5 + ["absent", "nothing", "no safetensors", "other policy", "NaN"]),
    as_json=st.booleans(),
)
def test_push_reaches_the_server_or_says_why_not(chosen, what, as_json):
    options, odd = chosen
    with a_world() as world, contextlib.closing(Running()) as running:
        policy = running.cluster.make_policy(1)
        folder = world.folder / "policy"
        folder.mkdir()
        if what == "no safetensors":
            (folder / "model.safetensors").write_bytes(b"no")
        elif what != "nothing":
            sent = {name: tensor.clone() for name, tensor in policy.items()}
            if what == "other policy":
                sent.popitem()
            if what == "NaN":
                next(iter(sent.values())).view(-1)[0] = torch.nan
            save_file(sent, folder / "model.safetensors")
        entry_point = entry_point_of(running)
        with mock.patch("fp8refit.driver.adapters.entry_points", lambda group: [entry_point]):
            result = world.run(
                "push", "absent" if what == "absent" else "policy", *options, *(["--json"] if as_json else [])
            )
        assert result.exit_code == (0 if odd is None and what == "policy" else 2), (options, result.output)
        assert_named(odd if what != "absent" else None, result)
        if result.exit_code == 0:
            running.cluster.assert_holds(policy, version=1)
        elif not (odd is None and what == "NaN"):
            assert running.events == []
        if as_json and result.stdout:
            servers = PushResult.model_validate_json(result.stdout).servers
            assert [server.error is None for server in servers] == [result.exit_code == 0]
        assert not as_json or result.exit_code != 0 or result.stdout


# demo


DEMO = Options(
    ("--steps", ["1", None], ODD_NUMBERS[:-1]),
    ("--refit-every", ["1", "5", None], ODD_NUMBERS[:-1]),
    ("--out", ["out", "far/away", "."], ["file", "file/under", "n" * 300]),
    ("--seed", ["0", "7", None], [number for number in ODD_NUMBERS if number != "0"]),
)


@DEMO.every_odd_value(as_json=True)
@given(chosen=DEMO.drawn(), as_json=st.booleans())
def test_demo_takes_options_that_are_good_before_it_trains(chosen, as_json):
    options, odd = chosen
    begun = []

    def run_demo(config, **_):
        begun.append(config)
        raise cli.RefitError("begun")

    with a_world() as world, mock.patch("fp8refit.cli.demo.run_demo", run_demo):
        (world.folder / "file").write_text("mine")
        result = world.run("demo", *options, *(["--json"] if as_json else []))
    assert result.exit_code == 2
    assert bool(begun) == (odd is None), (options, result.output)
    assert_named(odd, result)


@given(
    words=st.lists(
        st.sampled_from(["bench", "quantize", "push", "inspect", "--json", "--to", "x", "-1", "", "--", "-"])
    )
)
def test_words_in_any_order_are_refused(words):
    with a_world() as world:
        before = world.read()
        assert world.run(*words, "--no-such-option").exit_code == 2
        assert world.read() == before
