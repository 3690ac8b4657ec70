"""The command line: what it writes where, and its exit codes. Engines are real or, where that does not matter, fake."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import EntryPoints
from typing import get_args

import pytest
import torch
import typer
from fp8refit_transformers import TransformersEngine, to_block_fp8
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config
from typer.testing import CliRunner

from fp8refit import Refitter, __version__, quantize_blockwise
from fp8refit.checkpoint import CheckpointReport
from fp8refit.cli import commands as cli
from fp8refit.cli import demo, doctor
from fp8refit.cli.guards import ended_in_order
from fp8refit.cli.show_layout import show_layout
from fp8refit.live.formats import FLOAT_SCALES
from fp8refit.live.layout import EngineLayout, KvLayout, SlotLayout
from fp8refit.live.slots import SCALE_SUFFIX

BAD_TENSOR = "model.layers.0.mlp.up_proj.weight"


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [str(argument) for argument in arguments])


def make_model(seed=0):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=160,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "policy"
    make_model().save_pretrained(folder)
    return folder


def fake_result(*, falls):
    losses = [(5.0, 5.0), (2.0, 2.0) if falls else (4.9, 4.9)]
    rounds = tuple(
        demo.Round(
            step=10 * index,
            version=index,
            train_loss=None if index == 0 else 3.25,
            trainer_loss=trainer,
            refitted_loss=refitted,
            stale_loss=5.0,
            refit_ms=None if index == 0 else 7.5,
            gb_per_s=None if index == 0 else 2.5,
        )
        for index, (trainer, refitted) in enumerate(losses)
    )
    return demo.DemoResult(rounds=rounds, seconds=1.0, chart="out/demo.png", sample="The [bold] word")


def fake_demo(result, configs):
    def run_demo(config, *, on_round):
        configs.append(config)
        for row in result.rounds:
            on_round(row)
        return result

    return run_demo


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"{__version__}\n")


def test_help_names_every_command_and_imports_no_engine():
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in ("demo", "inspect", "quantize"))
    code = "import sys, fp8refit.cli; print([name for name in ('transformers', 'vllm', 'matplotlib') if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"


def test_inspect_json_is_the_layout_and_nothing_else(checkpoint):
    result = run("inspect", checkpoint, "--engine", "transformers", "--json")
    assert result.exit_code == 0, result.output
    expected = Refitter(TransformersEngine.boot(str(checkpoint))).layout()
    assert EngineLayout.model_validate_json(result.stdout) == expected
    assert result.stdout.count("\n") == 1


def test_doctor_shows_what_this_machine_has(monkeypatch):
    monkeypatch.setenv("FP8REFIT_DROP_IN", "1")
    monkeypatch.setenv("FP8REFIT_KEEP", "*.bias")
    result = run("doctor")
    said = " ".join(result.stdout.replace("│", " ").split())
    assert f"fp8refit {__version__}" in said and f"torch {torch.__version__}" in said
    assert "adapters sglang, transformers, vllm" in said and "in /dev/shm" in said
    assert "drop-in on, keep=['*.bias']" in said
    assert re.search("this machine can refit: .*transformers in this environment, and servers by URL └", said)
    assert result.exit_code == 0 and result.stderr == ""


def test_doctor_says_whether_an_engine_can_be_refitted(checkpoint):
    result = run("doctor", checkpoint, "--engine", "transformers", "--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    layout = EngineLayout.model_validate_json(run("inspect", checkpoint, "--engine", "transformers", "--json").stdout)
    num_fp8 = sum(slot.format is not None for slot in layout.slots)
    expected = f"can be refitted: yes; {len(layout.slots)} slots, {num_fp8} of them FP8"
    assert num_fp8 and checks[str(checkpoint)] == {"name": str(checkpoint), "found": expected, "problem": ""}
    assert checks["KV cache"]["found"] == "auto, not FP8: there are no scales to recompute"
    assert "this machine" not in checks
    assert expected in run("inspect", checkpoint, "--engine", "transformers").stdout.splitlines()[1]


@pytest.mark.parametrize(
    ("variables", "installed", "problem"),
    [
        ({"VLLM_PLUGINS": "other"}, {"vllm"}, "vllm: VLLM_PLUGINS=other leaves out fp8refit"),
        ({"FP8REFIT_DROP_IN": "perhaps"}, set(), "drop-in: FP8REFIT_* variables: Input should be a valid boolean"),
    ],
)
def test_doctor_ends_badly_and_names_each_problem(variables, installed, problem, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    version_of = doctor._version_of
    monkeypatch.setattr(doctor, "_version_of", lambda name: "1.2" if name in installed else version_of(name))
    result = run("doctor")
    assert problem in result.stderr and len(result.stderr.splitlines()) == 1
    assert "; 1 problem(s) above" in result.stdout.splitlines()[-2]
    assert result.exit_code == 1


def test_doctor_names_a_plugin_that_an_engine_does_not_find(monkeypatch):
    monkeypatch.setattr(doctor, "_version_of", lambda name: "1.2")
    monkeypatch.setattr(doctor, "entry_points", lambda group: EntryPoints())
    said = run("doctor").stderr
    assert "vllm: it does not find the plugin fp8refit; install" in said
    assert "sglang: it does not find the plugin fp8refit; install" in said


@pytest.mark.parametrize(
    ("capability", "shared_bytes", "problem"),
    [((9, 0), 8 << 30, ""), ((8, 0), 8 << 30, "GPU 0: it has no FP8"), ((9, 0), 64 << 20, "--shm-size=8g")],
)
def test_doctor_judges_gpus_and_shared_memory(capability, shared_bytes, problem, monkeypatch):
    cuda = doctor.torch.cuda
    fakes = {"is_available": lambda: True, "device_count": lambda: 1, "get_device_name": lambda index: "A card"}
    for name, fake in (fakes | {"get_device_capability": lambda index: capability}).items():
        monkeypatch.setattr(cuda, name, fake)
    monkeypatch.setattr(cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(doctor.torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: doctor.shutil._ntuple_diskusage(0, 0, shared_bytes))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    result = run("doctor")
    said = " ".join(result.stdout.replace("│", " ").split())
    assert f"A card, compute capability {capability[0]}.{capability[1]}, " in said and "NCCL 2.28.9" in said
    assert "expandable_segments: state dicts go through a bucket" in said
    assert problem in result.stderr and bool(result.stderr) == bool(problem)


def test_inspect_json_survives_an_engine_that_writes_to_standard_output(checkpoint, tmp_path):
    noisy = (
        "import ctypes, os, sys\n"
        "from fp8refit_transformers import TransformersEngine\n"
        "from fp8refit import cli\n"
        "boot = TransformersEngine.boot\n"
        "def noisy_boot(model):\n"
        "    print('noise from Python')\n"
        "    os.write(1, b'noise from below')\n"
        "    booted = boot(model)\n"
        "    ctypes.CDLL(None).puts(b'noise from C')\n"
        "    return booted\n"
        "TransformersEngine.boot = noisy_boot\n"
        "cli.app(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", noisy, "inspect", str(checkpoint), "--engine", "transformers", "--json"]
    buffering = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=buffering)
    assert EngineLayout.model_validate_json(done.stdout).engine == "transformers"
    assert all(f"noise from {source}" in done.stderr for source in ("Python", "below", "C"))


def test_inspect_shows_kinds_slots_and_aliases(checkpoint):
    result = run("inspect", checkpoint, "--engine", "transformers")
    assert result.exit_code == 0, result.output
    rows = [" ".join(line.replace("│", " ").split()) for line in result.stdout.splitlines()]
    layers = make_model().model.layers
    linears = [module for module in layers.modules() if isinstance(module, torch.nn.Linear)]
    num_bytes = sum(
        linear.weight.numel() + 4 * -(-linear.out_features // 128) * -(-linear.in_features // 128) for linear in linears
    )
    kind = "float8_e4m3fn, fp32 scales per 128x128 block"
    assert f"BlockFp8Linear {kind} {len(linears)} {num_bytes / 1e6:.2f}" in rows
    assert f"{BAD_TENSOR} [192, 160] [192, 160] {kind} BlockFp8Linear" in rows
    assert "lm_head.weight shares the slot of model.embed_tokens.weight" in rows


def test_inspect_shows_a_row_for_each_tensor_of_all_layers_and_experts(monkeypatch, capsys):
    def slot(name, rows):
        return SlotLayout(
            name=name,
            module="m",
            full_shape=(rows, 128),
            shape=(rows, 128),
            offset=(0, 0),
            dtype="bfloat16",
            scale_format=None,
            block_size=None,
            kernel="",
        )

    layers = [f"model.layers.{index}" for index in range(48)]
    slots = [
        slot(f"{layer}.mlp.experts.{e}.{part}.weight", 768) for layer in layers for e in range(128) for part in "abc"
    ]
    slots += [slot(f"{layer}.mlp.gate.weight", 128 if index else 64) for index, layer in enumerate(layers)]
    aliases = {f"{layer}.moe.gate.weight": f"{layer}.mlp.gate.weight" for layer in layers}
    written = {f"{layer}.moe.down.weight": (f"{layer}.moe.down",) for layer in layers}
    written |= {"a.0.stack": (), "stack": ("stack",), "b.0.stack": ("b.0.{}.gate", "b.0.{}.up")}
    layout = EngineLayout(
        engine="fake", versions={}, device="cpu", slots=slots, aliases=aliases, written_as=written, refusals=()
    )
    monkeypatch.setenv("COLUMNS", "160")
    show_layout(layout)
    shown = capsys.readouterr().out
    assert shown.count(".mlp.") == 3 + 2 + 1
    assert "model.layers.{0..47}.moe.down.weight is stored as model.layers.{0..47}.moe.down in a block-FP8" in shown
    assert "a.0.stack cannot be stored in a block-FP8 checkpoint" in shown
    assert "b.0.stack is stored as b.0.{}.gate, b.0.{}.up in a block-FP8" in shown
    assert shown.count("stored") == 3
    assert "model.layers.{0..47}.mlp.experts.{0..127}.b.weight" in shown
    assert "model.layers.{1..47}.mlp.gate.weight" in shown
    assert "model.layers.{0..47}.moe.gate.weight shares the slot of model.layers.{0..47}.mlp.gate.weight" in shown


def test_inspect_shows_slices_and_refusals(monkeypatch, capsys):
    slot = SlotLayout(
        name="a.weight",
        module="a",
        full_shape=(256, 128),
        shape=(128, 128),
        offset=(128, 0),
        dtype="float8_e4m3fn",
        scale_format="ue8m0",
        block_size=(128, 128),
        kernel="Kernel",
    )
    scales = {"layers.0.attn": ("q", "k", "v"), "layers.1.attn": ("k", "v")}
    kv = KvLayout(dtype="fp8_e4m3", backend="FLASHINFER", scales=scales, refusals=("c: keeps [numbers]. Set z",))
    layout = EngineLayout(
        engine="fake",
        versions={},
        device="cpu",
        slots=(slot,),
        aliases={},
        refusals=("b: repacked [x]. Set y", "a: repacked [x]. Set y"),
        kv=kv,
    )
    assert layout.verdict == "can be refitted: no, for 1 cause(s)"
    monkeypatch.setenv("COLUMNS", "160")
    show_layout(layout)
    shown = capsys.readouterr().out
    assert "[128, 128] at [128, 0]" in shown and "ue8m0" in shown
    assert "cannot be refitted: b, a: repacked [x]. Set y" in shown
    assert "KV cache: fp8_e4m3 under FLASHINFER; scales: 1 of q, 2 of k, 2 of v" in shown
    assert "KV scales cannot be set: c: keeps [numbers]. Set z" in shown


def test_names_are_whole_in_a_narrow_terminal_and_in_a_pipe(checkpoint, monkeypatch):
    arguments = ["inspect", str(checkpoint), "--engine", "transformers"]
    narrow = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, arguments).stdout.splitlines()
    assert narrow[narrow.index(BAD_TENSOR) + 1] == (
        "  [192, 160] of [192, 160], float8_e4m3fn, fp32 scales per 128x128 block, BlockFp8Linear"
    )
    monkeypatch.delenv("COLUMNS", raising=False)
    piped = CliRunner().invoke(cli.app, arguments).stdout
    names = {slot.name for slot in Refitter(TransformersEngine.boot(str(checkpoint))).layout().slots}
    rows = {cells[0].strip(): cells[3].strip() for cells in re.findall(r"^│" + 5 * r"([^│\n]*)│", piped, re.MULTILINE)}
    assert rows.keys() == names
    assert rows[BAD_TENSOR] == "float8_e4m3fn, fp32 scales per 128x128 block"
    assert re.search("^KV cache: auto under .*; not FP8: there are no scales to recompute$", piped, re.MULTILINE)
    assert "cannot be set" not in piped


def broken(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"model_type": "nope"}', "transformers cannot boot .*`nope`"),
        (b'{"model_type": "qwen3", "head_dim": "x"}', "transformers cannot boot .*head_dim"),
        (b"{", "transformers cannot boot .*not a valid JSON"),
        (b"\xff", "transformers cannot boot "),
        (b"[]", "transformers cannot boot "),
    ],
)
def test_a_model_that_the_engine_does_not_know_is_refused_with_the_engine_s_words(tmp_path, content, words):
    result = run("inspect", broken(tmp_path, content), "--engine", "transformers")
    assert result.exit_code == cli.EXIT_REFUSED, result.exception
    assert re.search(words, result.stderr) and "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", "/absent", "--engine", "transformers"), "no config.json"),
        (("inspect", "/absent", "--engine", "nothing"), "no adapter is called 'nothing'"),
    ],
    ids=["no model", "no adapter"],
)
def test_a_refusal_is_a_message_on_standard_error(arguments, words):
    result = run(*arguments)
    assert result.exit_code == cli.EXIT_REFUSED
    assert words in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""


def test_other_errors_keep_their_traceback(monkeypatch):
    def boot(model):
        raise ZeroDivisionError

    monkeypatch.setattr(TransformersEngine, "boot", boot)
    assert isinstance(run("inspect", "/absent", "--engine", "transformers").exception, ZeroDivisionError)


def test_quantize_writes_what_the_engine_then_holds(checkpoint, tmp_path):
    layout = tmp_path / "layout.json"
    layout.write_text(run("inspect", checkpoint, "--engine", "transformers", "--json").stdout)
    result = run("quantize", checkpoint, tmp_path / "fp8", "--like", layout, "--json")
    assert result.exit_code == 0, result.output
    report = CheckpointReport.model_validate_json(result.stdout)
    assert report.num_quantized == 7

    engine = to_block_fp8(make_model(seed=1))
    Refitter(engine).refit(tmp_path / "fp8")
    expected = to_block_fp8(make_model()).state_dict()
    for name, tensor in engine.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


def test_checkpoints_get_scales_of_every_kind_but_exponents():
    assert {*get_args(cli._FloatScales)} == {*FLOAT_SCALES}


def test_quantize_in_a_format(checkpoint, tmp_path):
    result = run("quantize", checkpoint, tmp_path / "fp8", "--scale-format", "ue8m0")
    assert result.exit_code == 0, result.output
    report = CheckpointReport.model_validate_json(run("quantize", checkpoint, tmp_path / "again", "--json").stdout)
    folder, *table, sizes = result.stdout.splitlines()
    assert folder == f"wrote {tmp_path / 'fp8'}"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table if line.startswith("│")]
    assert rows == [["quantized", str(report.num_quantized), "ue8m0"], ["copied", str(report.num_copied), ""]]
    read, written = (f"{count / 1e3:.1f} kB" for count in (report.bytes_read, report.bytes_written))
    assert sizes == f"{read} read, {written} written to 1 safetensors file"
    engine = to_block_fp8(make_model(seed=1))
    Refitter(engine).refit(tmp_path / "fp8")
    scale = engine.state_dict()[BAD_TENSOR + SCALE_SUFFIX]
    assert torch.equal(torch.log2(scale), torch.log2(scale).round())


def test_quantize_per_channel(checkpoint, tmp_path):
    result = run("quantize", checkpoint, tmp_path / "fp8", "--per-channel")
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert (config["quant_method"], group["weights"]["strategy"]) == ("compressed-tensors", "channel")
    (file,) = (tmp_path / "fp8").glob("*.safetensors")
    held = load_file(file)
    weight = make_model().get_parameter(BAD_TENSOR).bfloat16()
    codes, scale = quantize_blockwise(weight, block_size=(1, weight.shape[1]), scale_format="fp32_dividing")
    assert torch.equal(held[BAD_TENSOR].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(held[f"{BAD_TENSOR}_scale"], scale)
    refused = run("quantize", checkpoint, tmp_path / "other", "--per-channel", "--container", "modelopt")
    assert refused.exit_code == 2 and "modelopt has no scales per row" in refused.output
    refused = run("quantize", checkpoint, tmp_path / "other", "--per-channel", "--scale-format", "ue8m0")
    assert refused.exit_code == 2 and "leave out --scale-format" in refused.output
    assert not (tmp_path / "other").exists()


def test_quantize_refuses_nan_and_names_the_tensor(tmp_path):
    model = make_model()
    with torch.no_grad():
        model.get_parameter(BAD_TENSOR)[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "policy")
    result = run("quantize", tmp_path / "policy", tmp_path / "fp8")
    assert result.exit_code == cli.EXIT_REFUSED
    assert BAD_TENSOR in result.stderr
    assert not (tmp_path / "fp8").exists()


ENDED = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup, which ignores it
from fp8refit.checkpoint import quantize
from fp8refit.cli import commands as cli
def save(tensors, file):
    file.write_bytes(b"half of it")
    print("writing", flush=True)
    while True:
        time.sleep(0.1)  # a signal just before a sleep does not end it
quantize._save = save
cli.app(sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_quantize_leaves_nothing(checkpoint, tmp_path, number):
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "-c", ENDED, "quantize", str(checkpoint), str(tmp_path / "far" / "fp8")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        assert [path.name for path in tmp_path.rglob("*.safetensors") if "far" in str(path)]
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert sorted(tmp_path.rglob("*")) == before


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_in_order():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_quantize_into_the_current_folder(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = run("quantize", checkpoint, ".")
    assert result.exit_code == 0, result.output
    assert {"config.json", "model-00001-of-00001.safetensors"} < set(os.listdir("."))


def test_the_demo_s_folder_is_made_before_it_trains(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "run_demo", fake_demo(fake_result(falls=True), configs := []))
    (tmp_path / "file").write_text("")
    result = run("demo", "--out", tmp_path / "file" / "out")
    assert result.exit_code == 2 and "--out" in result.stderr
    assert configs == []


def test_quantize_refuses_a_file_that_is_no_layout(checkpoint, tmp_path):
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps({"engine": "x"}))
    result = run("quantize", checkpoint, tmp_path / "fp8", "--like", layout)
    assert result.exit_code == cli.EXIT_REFUSED
    assert "not a layout" in result.stderr


@pytest.mark.parametrize("changed", [{"dtype": "nonsense"}, {"dtype": "nn"}, {"block_size": [0, 128]}])
def test_quantize_refuses_a_layout_that_no_engine_has(checkpoint, tmp_path, changed):
    layout = json.loads(run("inspect", checkpoint, "--engine", "transformers", "--json").stdout)
    layout["slots"][1] |= changed
    (tmp_path / "layout.json").write_text(json.dumps(layout))
    result = run("quantize", checkpoint, tmp_path / "fp8", "--like", tmp_path / "layout.json")
    assert result.exit_code == cli.EXIT_REFUSED, result.exception
    assert "not a layout" in result.stderr


def test_demo_json_is_one_object_a_round_and_the_result(monkeypatch):
    configs = []
    monkeypatch.setattr(demo, "run_demo", fake_demo(fake_result(falls=True), configs))
    result = run("demo", "--json", "--steps", 10, "--refit-every", 5, "--seed", 3, "--out", "there")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["kind"] for row in rows] == ["round", "round", "result"]
    assert rows[1]["refitted_loss"] == 2.0 and rows[1]["refit_ms"] == 7.5
    assert rows[2]["fall"] == pytest.approx(0.6) and rows[2]["problems"] == []
    (config,) = configs
    assert (config.steps, config.refit_every, config.seed, str(config.out)) == (10, 5, 3, "there")


def test_demo_shows_a_table_and_what_the_engine_wrote(monkeypatch):
    monkeypatch.setattr(demo, "run_demo", fake_demo(fake_result(falls=True), []))
    result = run("demo")
    assert result.exit_code == 0, result.output
    cells = [line.replace("│", " ").split() for line in result.stdout.splitlines()]
    assert ["10", "1", "3.250", "2.0000", "2.0000", "5.0000", "7.5", "2.50"] in cells
    assert "The [bold] word" in result.stdout
    assert "fell by 60.0%" in result.stdout


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["table", "json"])
def test_demo_fails_if_the_loss_did_not_fall(monkeypatch, flags):
    monkeypatch.setattr(demo, "run_demo", fake_demo(fake_result(falls=False), []))
    result = run("demo", *flags)
    assert result.exit_code == cli.EXIT_FAILED
    assert "fell by 2.0%" in result.output


def commands_of(group, path=()):
    """The words of a group and of all commands under it."""
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands_of(command, (*path, name))


@pytest.mark.parametrize("words", commands_of(typer.main.get_command(cli.app)), ids=" ".join)
def test_help_at_80_columns_cuts_nothing_and_shows_flags_without_a_type(words):
    result = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, [*words, "--help"])
    text = result.stdout.partition("\n")[2]
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in text and "…" not in text
    assert re.search(r"^  --help +Show this message", text, re.MULTILINE)
    assert ("--json" not in text) or re.search(r"^  --json +Write only JSON", text, re.MULTILINE)
