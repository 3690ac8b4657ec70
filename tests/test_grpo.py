"""The loop of `examples/grpo.py` over an engine that says what it is told to, and its parts."""

import argparse
import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fp8refit import quantize_blockwise
from fp8refit.training import correction

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def grpo():
    """The example as a module; it finds its own files as Python lets scripts do."""
    sys.path.insert(0, str(EXAMPLES))
    import grpo

    yield grpo
    sys.path.remove(str(EXAMPLES))


@pytest.fixture
def options(tmp_path, grpo):
    return argparse.Namespace(
        engine="transformers",
        size="tiny",
        prompts=2,
        updates=2,
        steps=3,
        save_every=2,
        target=0.3,
        set={},
        environment={},
        beside_others=False,
        out=tmp_path,
        deadline_s=math.inf,
    )


class Teller:
    """An engine whose first answer to each prompt is right, and whose log-probabilities are half of what they should be."""

    kernels = ("told",)

    def __init__(self, grpo):
        self.grpo, self.updates, self.version = grpo, [], {}

    def update(self, policy, calibration):
        self.updates.append((policy.lm_head.weight.detach().clone(), calibration))

    def generate(self, prompts, *, max_tokens, end):
        answers = self.grpo.solve(prompts)
        wrong = torch.arange(len(prompts)) % self.grpo.GROUP > 0
        answers[wrong, 2] = 7
        rows = [(row, [-2.0] * max_tokens) for row in answers.tolist()]
        rows[-1] = ([*rows[-1][0][:2], end], [-2.0] * 3)  # which ends too soon
        return self.grpo.Rollouts.of(prompts, rows, max_tokens)


def make_run(grpo, options, variant="fp8kv", seed=0):
    torch.manual_seed(seed)
    policy = grpo.make_policy(grpo.SIZES["tiny"])
    return grpo.Run(grpo.Variant.of(variant), seed, 1e-3, policy, Teller(grpo), options)


def test_only_whole_answers_are_rewarded(grpo):
    prompts = torch.tensor([[3, 1, 2, grpo.SEPARATOR]] * 4)
    right = [1, 2, 3, grpo.END]
    answers = [right, [1, 3, 2, grpo.END], [1, 2, 3], [1, 2, 3, 0]]
    rollouts = grpo.Rollouts.of(prompts, [(answer, [-1.0] * len(answer)) for answer in answers], 4)
    assert grpo.reward(rollouts).tolist() == [1, 0, 0, 0]
    assert rollouts.mask.sum(-1).tolist() == [4, 4, 3, 4]
    assert rollouts.calibration[2] == [3, 1, 2, grpo.SEPARATOR, 1, 2, 3]


def test_the_warm_up_shows_falling_order_more_often_than_the_right_one(grpo):
    prompts = torch.tensor([[3, 1, 2, grpo.SEPARATOR]] * 2000)
    answers = grpo.demonstrate(prompts, torch.Generator().manual_seed(0))
    is_right = (answers == torch.tensor([1, 2, 3, grpo.END])).all(-1)
    is_falling = (answers == torch.tensor([3, 2, 1, grpo.END])).all(-1)
    assert (is_right | is_falling).all()
    assert is_right.float().mean().item() == pytest.approx(grpo.SHARE_RISING, abs=0.05)


def test_the_expected_reward_is_the_chance_of_the_right_answer(grpo):
    policy = grpo.make_policy(grpo.SIZES["tiny"])
    prompts = torch.tensor([[3, 1, grpo.SEPARATOR]])
    chance, tokens = 1.0, prompts
    for token in (1, 3, grpo.END):
        chance *= policy(input_ids=tokens).logits[0, -1].double().softmax(-1)[token].item()
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
    assert grpo.expected_reward(policy, prompts) == pytest.approx(chance, rel=1e-4)


def test_every_step_learns_measures_and_refits(grpo, options):
    run = make_run(grpo, options, "fp8kv+token")
    before = grpo.logprobs_of(run.policy, run.held_out, grpo.solve(run.held_out)).mean().item()
    records = list(run.steps())
    assert [record["step"] for record in records] == [1, 2, 3]
    assert {record["reward"] for record in records} == {1 / grpo.GROUP}
    assert all(record["changed_bf16"] > 0.5 and record["k3"] > 1 for record in records)
    after = grpo.logprobs_of(run.policy, run.held_out, grpo.solve(run.held_out)).mean().item()
    assert after > before + 0.05
    weights, calibrations = zip(*run.engine.updates, strict=True)
    assert len(weights) == 4 and torch.equal(weights[-1], run.policy.lm_head.weight)
    assert all(not torch.equal(a, b) for a, b in pairwise(weights))
    assert all(calibrations)


def test_a_trainer_in_the_engines_precision_says_what_the_engine_says(grpo, options):
    size, k3 = grpo.SIZES["tiny"], {}
    for variant in ("fp8", "unified"):
        torch.manual_seed(0)
        policy, folder = grpo.make_policy(size), options.out / "model"
        policy.save_pretrained(folder)
        engine = grpo.ENGINES["transformers"](folder, variant, {})
        records = list(grpo.Run(grpo.Variant.of(variant), 0, 1e-3, policy, engine, options).steps())
        k3[variant] = max(record["k3"] for record in records)
    assert len(records) == 3 and k3["unified"] < k3["fp8"] / 10


def test_a_stale_engine_is_given_the_first_policy_alone(grpo, options):
    run = make_run(grpo, options, "fp8-stale")
    first = run.policy.lm_head.weight.detach().clone()
    list(run.steps())
    ((given, calibration),) = run.engine.updates
    assert torch.equal(given, first) and calibration is None


@pytest.mark.parametrize("variant", ["bf16", "bf16+icepop", "bf16+adaptive"])
def test_the_loss_is_weighted_by_the_correction(grpo, options, monkeypatch, variant):
    """The engine says that everything it samples is likelier than it is: no correction but none leaves the loss alone."""
    losses = []
    monkeypatch.setattr(grpo, "take_step", lambda policy, optimizer, loss: losses.append(loss.item()))
    run = make_run(grpo, options, variant)
    record = run.step()
    # Ratios are below 0.5: IcePop masks them all. The ESS beside it is that of the ratios, whatever the loss does with them.
    assert (record["masked_fraction"], record["weights_ess"] > 0) == ((1, False) if "icepop" in variant else (0, True))
    assert 0 < record["ess"] < 1
    rollouts = run.engine.generate(
        grpo.make_prompts(run.size, 2, torch.Generator().manual_seed(1000)).repeat_interleave(grpo.GROUP, 0),
        max_tokens=7,
        end=grpo.END,
    )
    rewards = grpo.reward(rollouts).view(2, -1)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    trainer = grpo.logprobs_of(run.policy, rollouts.prompts, rollouts.tokens).detach()
    both = trainer, rollouts.logprobs, rollouts.mask
    expected = {
        "bf16": torch.ones_like(trainer),
        "bf16+icepop": correction.importance_weights(*both, lower=0.5, upper=5.0, outside="zero"),
        "bf16+adaptive": correction.adaptive_weights(correction.importance_weights(*both), both[2])[0],
    }[variant]
    assert losses == pytest.approx([-(expected * advantages)[both[2]].mean().item()] * options.updates, abs=1e-5)


def test_a_run_goes_on_from_its_last_saved_step(grpo, options):
    whole = make_run(grpo, options)
    list(whole.steps())
    interrupted = make_run(grpo, options)
    for record in interrupted.steps():
        if record["step"] == 2:
            break
    resumed = make_run(grpo, options)
    torch.nn.init.zeros_(resumed.policy.lm_head.weight)  # what was saved is what counts
    records = list(resumed.steps())
    assert [record["step"] for record in resumed.records] == [1, 2, 3] and len(records) == 1
    torch.testing.assert_close(resumed.policy.state_dict(), whole.policy.state_dict())


def test_a_runs_state_is_kept_until_its_result_is_written(grpo, options, monkeypatch):
    monkeypatch.setenv(grpo.COMMAND, "python")
    run = make_run(grpo, options)
    list(run.steps())

    def die(*arguments):
        raise OSError("no space left")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr(grpo, "add_run", die)
        grpo.finish(run)
    again = make_run(grpo, options)
    assert [record["step"] for record in again.steps()] == [3]  # the step after the last saved one
    grpo.finish(again)
    assert not run.state_file.exists()
    (result,) = json.loads((options.out / "grpo.json").read_text())["runs"]
    assert result["steps"]["step"] == [1, 2, 3]


OTHER_SETTINGS = {
    "engine": ("vllm", "engine was transformers, now vllm"),
    "size": ("small", "size was tiny, now small"),
    "steps": (4, "num_steps was 3, now 4"),
    "prompts": (3, "prompts was 2, now 3"),
    "updates": (1, "updates was 2, now 1"),
    "target": (0.5, "target was 0.3, now 0.5"),
    "set": ({"dtype": "float16"}, "engine_options was {}, now {'dtype': 'float16'}"),
    "environment": ({"VLLM_USE_DEEP_GEMM": "0"}, "environment was {}, now {'VLLM_USE_DEEP_GEMM': '0'}"),
}


@pytest.fixture
def other(request, options):
    """The options with one other setting, and what is said of it."""
    value, said = OTHER_SETTINGS[request.param]
    return argparse.Namespace(**vars(options) | {request.param: value}), said


@pytest.mark.parametrize("other", OTHER_SETTINGS, indirect=True)
def test_runs_of_other_settings_are_not_taken_for_these(grpo, options, other, monkeypatch):
    monkeypatch.setenv(grpo.COMMAND, "python")
    run = make_run(grpo, options)
    list(run.steps())
    grpo.finish(run)
    grpo.check_results(options)
    changed, said = other
    with pytest.raises(SystemExit) as refused:
        grpo.check_results(changed)
    assert said in str(refused.value) and "grpo.json" in str(refused.value) and "another --out" in str(refused.value)


@pytest.mark.parametrize("other", ["updates"], indirect=True)
def test_a_run_does_not_go_on_with_other_settings(grpo, options, other):
    list(make_run(grpo, options).steps())
    changed, said = other
    with pytest.raises(SystemExit, match=said):
        next(make_run(grpo, changed).steps())


def test_each_precision_is_run_in_a_process_of_its_own(grpo, options, monkeypatch):
    commands = []
    monkeypatch.setattr(
        grpo.subprocess, "run", lambda command: commands.append(command) or argparse.Namespace(returncode=0)
    )
    options.variants = [grpo.Variant.of(text) for text in ("fp8kv+token", "bf16", "fp8kv-stale")]
    assert grpo.run_apart(["bf16", "fp8kv"], options) == 0
    asked = [["--variants", "bf16", "--minutes", "inf"], ["--variants", "fp8kv+token,fp8kv-stale", "--minutes", "inf"]]
    assert [command[-4:] for command in commands] == asked


def test_settings_that_an_older_file_lacks_are_not_compared(grpo, options):
    run = {"size": "tiny", "steps": {"step": [1.0, 2.0, 3.0]}}
    (options.out / "grpo.json").write_text(json.dumps({"runs": [run]}))
    grpo.check_results(options)
    options.steps = 4
    with pytest.raises(SystemExit, match="num_steps was 3, now 4"):
        grpo.check_results(options)


def test_density_is_the_share_of_what_changed(grpo):
    policy = grpo.make_policy(grpo.SIZES["tiny"])
    density = grpo.Density(policy)
    assert set(density.step(policy).values()) == {0.0}
    layer = policy.model.layers[0].mlp.down_proj
    before = quantize_blockwise(layer.weight.bfloat16())
    with torch.no_grad():
        layer.weight[:, :128] *= 2  # one column of blocks: codes stay, scales do not
    after = quantize_blockwise(layer.weight.bfloat16())
    assert torch.equal(before[0].view(torch.uint8), after[0].view(torch.uint8))
    found = density.step(policy)
    num_values = sum(parameter.numel() for parameter in policy.parameters())
    matrices = [p for name, p in policy.named_parameters() if ".layers." in name and p.ndim == 2]
    num_blocks = sum(math.ceil(p.shape[0] / 128) * math.ceil(p.shape[1] / 128) for p in matrices)
    changed = (layer.weight[:, :128] != 0).sum().item()
    assert found["changed_bf16"] == pytest.approx(changed / num_values)
    assert found["changed_codes_fp32"] == found["changed_codes_ue8m0"] == 0
    assert found["changed_scales_fp32"] == found["changed_scales_ue8m0"] == pytest.approx(1 / num_blocks)


@pytest.mark.parametrize("text", ["fp4", "fp8+magic", "fp8-old", "fp8kv-stale+none2", ""])
def test_what_is_no_variant_is_refused(grpo, text):
    with pytest.raises(SystemExit, match="is not a variant"):
        grpo.Variant.of(text)


@pytest.mark.parametrize("text", ["bf16", "fp8-stale", "fp8kv+adaptive", "fp8-stale+token"])
def test_variants_are_written_as_they_are_read(grpo, text):
    assert str(grpo.Variant.of(text)) == text


def test_results_are_summed_up_over_seeds_and_drawn(grpo, tmp_path):
    import grpo_results

    columns = ["step", "reward", "expected_reward", "k3", "token_mult_prob_error", "ess", "masked_fraction"]
    columns += [*grpo_results.CHANGED, "rollout_s", "train_s", "refit_s"]
    for seed in range(2):
        records = [dict.fromkeys(columns, 0.25) | {"step": step, "reward": 0.1 * step + seed} for step in range(1, 11)]
        run = {"variant": "fp8", "seed": seed, "lr": 1e-5, "warm_up_reward": 0.1 + 0.2 * seed, "is_alone": seed == 0}
        if seed:
            records = [record | {"refit_s": 7.0} for record in records]
        grpo_results.add_run(tmp_path, run, records, {"command": "python"})
    results = json.loads((tmp_path / "grpo.json").read_text())
    (row,) = results["summary"]
    assert row["reward"] == pytest.approx([0.95, 1.45, 1.95])  # of the last two steps
    assert row["warm_up_reward"] == pytest.approx([0.1, 0.2, 0.3])
    assert row["refit_share"] == pytest.approx([1 / 3] * 3) and row["refit_ms"] == pytest.approx([250] * 3)
    assert "0.200 -> 1.450 (0.950 to 1.950)" in grpo_results.describe([row])
    grpo_results.draw(results, tmp_path)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in grpo_results.PANELS)


def test_a_record_can_be_watched_as_soon_as_it_is_written(grpo, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = grpo.open_log(tmp_path)
    for step in (1, 2):
        log({"step": step, "reward": step / 4, "k3": 1e-4})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"step", "reward", "k3"}
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.25), (2, 0.5)]


def test_nothing_is_logged_without_tensorboard(grpo, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "find_spec", lambda name: None)
    grpo.open_log(tmp_path)({"step": 1, "reward": 1.0})
    assert list(tmp_path.iterdir()) == []
