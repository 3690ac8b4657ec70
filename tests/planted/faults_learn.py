"""Faults of corrections, of the GRPO example and of the benchmark of rollouts."""

from tests.planted.fault import Fault

CORRECTION = "fp8refit/correction.py"
FUZZ = "tests/fuzz/test_learn.py"
EXAMPLE = "examples/grpo.py"
LOOP = "tests/test_grpo.py"

FAULTS = [
    Fault(
        name="what is masked leaks into log-ratios",
        path=CORRECTION,
        before="torch.where(apart, ours - theirs, 0.0).clamp(",
        after="((ours - theirs) * apart).clamp(",
        found_by=FUZZ,
    ),
    Fault(
        name="log-ratios of tokens have no bound",
        path=CORRECTION,
        before="torch.where(apart, ours - theirs, 0.0).clamp(-LOG_BOUND, LOG_BOUND)",
        after="torch.where(apart, ours - theirs, 0.0)",
        found_by=FUZZ,
    ),
    Fault(
        name="the ratio of a sequence has no bound",
        path=CORRECTION,
        before='mean=level == "geometric").clamp(-LOG_BOUND, LOG_BOUND)',
        after='mean=level == "geometric")',
        found_by=f"{FUZZ}::test_weights_are_what_their_formulas_say",
    ),
    Fault(
        name="a mean over a sequence counts what is masked",
        path=CORRECTION,
        before="counts.sum(-1, keepdim=True).clamp(min=1)",
        after="counts.shape[-1]",
        found_by=FUZZ,
    ),
    Fault(
        name="weights are normalized over rows without tokens",
        path=CORRECTION,
        before="counts.any(-1, keepdim=True)\n    mean",
        after="counts.any(-1, keepdim=True) | True\n    mean",
        found_by=f"{FUZZ}::test_weights_are_what_their_formulas_say",
    ),
    Fault(
        name="a masked token vetoes its sequence",
        path=CORRECTION,
        before="math.log(least_ratio)) | ~counts).all",
        after="math.log(least_ratio)) & counts).all",
        found_by=f"{FUZZ}::test_a_sequence_is_vetoed_by_one_token",
    ),
    Fault(
        name="good sequences are dropped for their divergence",
        path=CORRECTION,
        before="advantages[:, None]) < 0",
        after="advantages[:, None]) <= 0",
        found_by=f"{FUZZ}::test_bad_sequences_off_the_policy_are_dropped",
    ),
    Fault(
        name="the share of correction forgets that the mean moves",
        path=CORRECTION,
        before="needed = deviation - room * (mean - 1)",
        after="needed = deviation",
        found_by=f"{FUZZ}::test_no_more_correction_than_leaves_enough_samples",
    ),
    Fault(
        name="an answer that ends too soon is rewarded",
        path=EXAMPLE,
        before="((rollouts.tokens == solve(rollouts.prompts)) & rollouts.mask).all(-1)",
        after="((rollouts.tokens == solve(rollouts.prompts)) | ~rollouts.mask).all(-1)",
        found_by=f"{LOOP}::test_only_whole_answers_are_rewarded",
    ),
    Fault(
        name="the loss forgets its correction",
        path=EXAMPLE,
        before="-(weights * gain)[rollouts.mask].mean()",
        after="-gain[rollouts.mask].mean()",
        found_by=f"{LOOP}::test_the_loss_is_weighted_by_the_correction",
    ),
    Fault(
        name="an engine that should be stale is refitted",
        path=EXAMPLE,
        before="if not self.variant.is_stale:\n            self.update_engine(rollouts.calibration)",
        after="if True:\n            self.update_engine(rollouts.calibration)",
        found_by=f"{LOOP}::test_a_stale_engine_is_given_the_first_policy_alone",
    ),
    Fault(
        name="a run goes on without its optimizer",
        path=EXAMPLE,
        before='self.optimizer.load_state_dict(state["optimizer"])',
        after="pass",
        found_by=f"{LOOP}::test_a_run_goes_on_from_its_last_saved_step",
    ),
    Fault(
        name="the warm-up leaves rewards nothing to choose",
        path=EXAMPLE,
        before="torch.where(is_rising, answers, falling)",
        after="answers",
        found_by=f"{LOOP}::test_the_warm_up_shows_falling_order_more_often_than_the_right_one",
    ),
    Fault(
        name="times of runs beside others are summed up",
        path="examples/grpo_results.py",
        before='for run in those if run["is_alone"]]',
        after="for run in those]",
        found_by=f"{LOOP}::test_results_are_summed_up_over_seeds_and_drawn",
    ),
    Fault(
        name="a case that took long is timed again",
        path="fp8refit/bench/rollout.py",
        before="sum(found) > (config.case_seconds or math.inf)",
        after="sum(found) > math.inf",
        found_by="tests/bench/test_rollout.py::test_a_case_that_took_long_is_not_timed_again",
    ),
    Fault(
        name="cases of a benchmark share prompts, which engines have cached",
        path="fp8refit/bench/rollout.py",
        before='f"{config.seed} {case} {next(runs)}"',
        after='f"{config.seed} {next(runs)}"',
        found_by="tests/bench/test_rollout.py::test_no_case_has_prompts_of_another",
    ),
    Fault(
        name="a benchmark that goes on measures all cases again",
        path="fp8refit/bench/rollout.py",
        before="[case for case in config.every_case if case not in timed]",
        after="config.every_case",
        found_by="tests/bench/test_rollout.py::test_a_command_goes_on_with_what_its_file_lacks",
    ),
]
