import json
import shlex

import fp8refit_transformers.rollout
import pytest
import torch
from typer.testing import CliRunner

from fp8refit import Refitter, UnsupportedEngineError
from fp8refit.bench import (
    Precision,
    RolloutBenchConfig,
    policies,
    rollout,
    rollout_result,
    run_rollout_bench,
    write_config,
)
from fp8refit.bench.engine import RefitBoot, open_bench_engine
from fp8refit.bench.rollout_engine import USUAL
from fp8refit.cli import app

TINY = {
    "engine": "transformers",
    "model": "tiny",
    "batch_sizes": (1, 2),
    "context_lengths": (8,),
    "num_new_tokens": (1, 3),
    "repeats": 2,
}


@pytest.fixture(scope="module")
def result():
    return run_rollout_bench(RolloutBenchConfig(**TINY))


def test_every_precision_is_timed_at_every_size(result):
    cases = [(timing.precision, *timing.case) for timing in result.timings]
    assert cases == [(precision, batch, 8, new) for precision in USUAL for batch in (1, 2) for new in (1, 3)]
    assert all(timing.tokens_per_s.min > 0 and timing.tokens_per_s.count == 2 for timing in result.timings)


def test_rates_are_held_against_bf16(result):
    base = {timing.case: timing.tokens_per_s.median for timing in result.timings[:4]}
    for timing in result.timings:
        assert timing.against_bf16 == pytest.approx(timing.tokens_per_s.median / base[timing.case])
    assert {timing.against_bf16 for timing in result.timings[:4]} == {1.0}


def test_rates_count_the_whole_and_prompts_are_timed_apart(monkeypatch):
    """Two seconds a call and one a token, on a clock of its own. The run before the timed ones is short."""
    now_s, asked = [0.0], []

    class Engine:
        def generate(self, prompts, num_tokens):
            asked.append((num_tokens, str(prompts)))
            now_s[0] += 2 + num_tokens

    monkeypatch.setattr(rollout.time, "perf_counter", lambda: now_s[0])
    timing = rollout._time(Engine(), RolloutBenchConfig(**TINY), Precision.FP8, (2, 8, 48))
    assert [num_tokens for num_tokens, _ in asked] == [32, 48, 48, 1, 1]
    assert len({prompts for _, prompts in asked}) == 5
    assert timing.tokens_per_s.median == timing.tokens_per_s.min == 2 * 48 / 50
    assert timing.prefill_s.median == 3


def test_no_case_has_prompts_of_another(monkeypatch):
    """An engine would find them in its prefix cache."""
    asked = []

    class Engine:
        def generate(self, prompts, num_tokens):
            asked.extend(map(tuple, prompts))

    for case in [(2, 8, 1), (2, 8, 3), (3, 8, 1)]:
        rollout._time(Engine(), RolloutBenchConfig(**TINY), Precision.FP8, case)
    assert len(set(asked)) == len(asked)


def test_a_case_that_took_long_is_not_timed_again(monkeypatch):
    now_s = [0.0]

    class Engine:
        def generate(self, prompts, num_tokens):
            now_s[0] += num_tokens

    monkeypatch.setattr(rollout.time, "perf_counter", lambda: now_s[0])
    config = RolloutBenchConfig(**TINY | {"repeats": 5}, case_seconds=50)
    timing = rollout._time(Engine(), config, Precision.FP8, (2, 8, 30))
    assert (timing.tokens_per_s.count, timing.prefill_s.count) == (2, 5)


def test_chosen_cases_are_timed_in_the_place_of_all_combinations():
    given = ["--cases", "1x8+2,2x4+9", "--repeats", "1", "--case-seconds", "7.5", "--precisions", "bf16"]
    ran = CliRunner().invoke(app, ["bench", "rollout", "--engine", "transformers", "--model", "tiny", *given, "--json"])
    assert ran.exit_code == 0, ran.output
    found = rollout.RolloutBenchResult.model_validate_json(ran.stdout)
    assert [timing.case for timing in found.timings] == [(1, 8, 2), (2, 4, 9)]
    assert (found.config.max_length, found.config.max_batch) == (13, 2)
    assert "--cases 1x8+2,2x4+9 --repeats 1 --seed 0 --case-seconds 7.5" in found.command
    assert "--batch-sizes" not in found.command


def test_kernels_and_formats_are_told(result):
    assert {precision: len(kernels) for precision, kernels in result.kernels.items()} == {"fp8": 1, "fp8+kv": 1}
    assert all("fp32" in kernel for kernels in result.kernels.values() for kernel in kernels)


def test_the_command_measures_the_same_again(result):
    ran = CliRunner().invoke(app, [*shlex.split(result.command)[1:], "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["config"] == json.loads(result.model_dump_json())["config"]


def test_a_command_goes_on_with_what_its_file_lacks(result, tmp_path, monkeypatch):
    file = tmp_path / "rollouts.json"
    lacking = result.model_copy(update={"timings": result.timings[:5] + result.timings[8:]})
    file.write_text(lacking.model_dump_json())
    written, open_engine = [], rollout._open
    monkeypatch.setattr(rollout, "_open", lambda *wanted: (written.append(wanted[-1]), open_engine(*wanted))[1])
    ran = CliRunner().invoke(app, [*shlex.split(result.command)[1:], "--out", str(file)])
    assert ran.exit_code == 0, ran.output
    assert written == [Precision.FP8]
    found = rollout.RolloutBenchResult.model_validate_json(file.read_text())
    assert {(t.precision, t.case) for t in found.timings} == {(t.precision, t.case) for t in result.timings}
    assert set(lacking.timings) <= set(found.timings)
    assert all(timing.against_bf16 is not None for timing in found.timings)


def test_a_file_of_another_command_is_left_alone(result, tmp_path):
    file = tmp_path / "rollouts.json"
    file.write_text(result.model_dump_json())
    before = file.read_bytes()
    ran = CliRunner().invoke(app, [*shlex.split(result.command)[1:], "--seed", "7", "--out", str(file)])
    assert ran.exit_code == 2 and "another command" in ran.output
    assert file.read_bytes() == before


def test_the_table_has_a_row_for_each_case():
    arguments = "bench rollout --engine transformers --model tiny --precisions fp8 --batch-sizes 1 --context-lengths 4"
    ran = CliRunner().invoke(app, [*arguments.split(), "--new-tokens", "2", "--repeats", "1"])
    assert ran.exit_code == 0, ran.output
    assert "tokens/s" in ran.stdout and "fp8" in ran.stdout


@pytest.fixture
def booted(monkeypatch):
    """What the adapter was asked to boot engines with."""
    asked = []

    def boot(wanted):
        asked.append(wanted.arguments)
        raise UnsupportedEngineError("seen")

    monkeypatch.setattr(fp8refit_transformers.rollout, "boot", boot)
    return asked


def test_arguments_of_the_engine_are_its_own_and_part_of_the_command(booted, monkeypatch):
    arguments = {"max_num_seqs": 3, "compilation_config": {"mode": 0, "sizes": [1, 2]}, "backend": "its own"}
    given = [part for name, value in arguments.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    CliRunner().invoke(app, ["bench", "rollout", "--engine", "transformers", "--model", "tiny", *given])
    assert booted == [arguments]
    config = RolloutBenchConfig(**TINY, engine_arguments=arguments)
    monkeypatch.setenv("TRANSFORMERS_KERNELS", "of one kind")
    monkeypatch.setenv("TRANSFORMERS_API_KEY", "a secret")
    environment = rollout_result.environment_of("transformers")
    assert environment["TRANSFORMERS_KERNELS"] == "of one kind" and "TRANSFORMERS_API_KEY" not in environment
    command = rollout_result.command_of(config, {"TRANSFORMERS_KERNELS": "of one kind"})
    first, program, *again = shlex.split(command)
    assert (first, program) == ("TRANSFORMERS_KERNELS=of one kind", "fp8refit")
    CliRunner().invoke(app, again)
    assert booted[1:] == [arguments]


def test_a_model_without_an_engine_takes_no_arguments():
    with pytest.raises(UnsupportedEngineError, match="no engine that takes max_num_seqs; leave out --set"):
        run_rollout_bench(RolloutBenchConfig(**TINY, engine_arguments={"max_num_seqs": 3}))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--new-tokens", "0"),
        ("--precisions", "fp4"),
        ("--batch-sizes", "many"),
        ("--cases", "16x512"),
        ("--cases", "16x0+1"),
        ("--case-seconds", "0"),
        ("--set", "max_num_seqs"),
        ("--set", "a=b"),
        ("--set", "a b=1"),
    ],
)
def test_what_is_no_case_is_refused(option, value):
    ran = CliRunner().invoke(app, ["bench", "rollout", "--engine", "transformers", "--model", "tiny", option, value])
    assert ran.exit_code == 2


@pytest.mark.parametrize("seed", [0, 3])
def test_a_streamed_policy_is_the_one_that_fills_tensors(seed, tmp_path):
    write_config("tiny", tmp_path)
    layout = Refitter(open_bench_engine("transformers", RefitBoot(model=tmp_path)).candidate).layout()
    cpu = torch.device("cpu")
    filled = policies.fill(policies.allocate(layout, cpu), seed)
    streamed = dict(policies.stream(policies.manifest(layout), seed, cpu))
    assert streamed.keys() == filled.keys()
    assert all(torch.equal(streamed[name], tensor) for name, tensor in filled.items())


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_bf16_and_fp8_engines_hold_one_policy(shape, is_tied, tmp_path):
    """With other routers, another number of experts would be read for a token."""
    config = RolloutBenchConfig(**TINY | {"model": shape}, seed=3)
    write_config(shape, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": is_tied}))
    held = {}
    for precision in (Precision.BF16, Precision.FP8):
        engine = rollout._open(config, tmp_path, precision)
        rollout._with_engine(rollout._empty_result(config), engine, precision)
        held[precision] = engine.candidate.state_dict()
    layout = Refitter(open_bench_engine("transformers", RefitBoot(model=tmp_path)).candidate).layout()
    policy = dict(policies.stream(policies.manifest(layout), 3, torch.device("cpu")))
    assert policy.keys() | ({"lm_head.weight"} if is_tied else set()) == held["bf16"].keys()
    assert all(torch.equal(held["bf16"][name], tensor) for name, tensor in policy.items())
    plain = [name for name, tensor in held["fp8"].items() if tensor.dtype is torch.bfloat16]
    assert plain and all(torch.equal(held["fp8"][name], held["bf16"][name]) for name in plain)


@pytest.mark.parametrize("precision", [each for each in Precision if each not in USUAL])
def test_an_engine_is_not_asked_to_quantize_itself_if_it_does_not(precision):
    config = RolloutBenchConfig(**TINY | {"precisions": (precision,)})
    with pytest.raises(UnsupportedEngineError, match=f"not timed with {precision}; use bf16, fp8, fp8\\+kv, or vllm"):
        run_rollout_bench(config)


def test_an_unknown_engine_is_refused():
    with pytest.raises(UnsupportedEngineError, match="no adapter is called 'nothing'"):
        run_rollout_bench(RolloutBenchConfig(**TINY | {"engine": "nothing"}))


def test_an_adapter_without_rollouts_is_refused_by_what_it_lacks(model):
    with pytest.raises(
        UnsupportedEngineError, match=r"the adapter fake does not support this benchmark: it has no tests\.rollout"
    ):
        run_rollout_bench(RolloutBenchConfig(**TINY | {"engine": "fake"}))
