"""Faults of corrections, of the GRPO example and of the benchmark of rollouts."""

from tests.planted.fault import Fault

CORRECTION = "fp8refit/training/correction.py"
FUZZ = "tests/fuzz/test_learn.py"
EXAMPLE = "examples/grpo.py"
LOOP = "tests/test_grpo.py"

FAULTS = [
    Fault(
        name="what is masked leaks into log-ratios",
        at=f"{CORRECTION}::_log_ratio",
        before="torch.where(apart, ours - theirs, 0.0)",
        after="(ours - theirs) * apart",
        found_by=FUZZ,
    ),
    Fault(
        name="log-ratios of tokens have no bound",
        at=f"{CORRECTION}::_log_ratio",
        before="torch.where(apart, ours - theirs, 0.0).clamp(-LOG_BOUND, LOG_BOUND)",
        after="torch.where(apart, ours - theirs, 0.0)",
        found_by=FUZZ,
    ),
    Fault(
        name="the ratio of a sequence has no bound",
        at=f"{CORRECTION}::importance_weights",
        before='_over_sequence(logs, counts, mean=level == "geometric").clamp(-LOG_BOUND, LOG_BOUND)',
        after='_over_sequence(logs, counts, mean=level == "geometric")',
        found_by=f"{FUZZ}::test_weights_are_what_their_formulas_say",
    ),
    Fault(
        name="a mean over a sequence counts what is masked",
        at=f"{CORRECTION}::_over_sequence",
        before="counts.sum(-1, keepdim=True).clamp(min=1)",
        after="counts.shape[-1]",
        found_by=FUZZ,
    ),
    Fault(
        name="weights are normalized over rows without tokens",
        at=f"{CORRECTION}::_mean_weight",
        before="counts.any(-1, keepdim=True)",
        after="counts.any(-1, keepdim=True) | True",
        found_by=f"{FUZZ}::test_weights_are_what_their_formulas_say",
    ),
    Fault(
        name="a masked token vetoes its sequence",
        at=f"{CORRECTION}::veto_mask",
        before="(ours >= theirs + math.log(least_ratio)) | ~counts",
        after="(ours >= theirs + math.log(least_ratio)) & counts",
        found_by=f"{FUZZ}::test_a_sequence_is_vetoed_by_one_token",
    ),
    Fault(
        name="good sequences are dropped for their divergence",
        at=f"{CORRECTION}::opsm_mask",
        before="(advantages if advantages.ndim == counts.ndim else advantages[:, None]) < 0",
        after="(advantages if advantages.ndim == counts.ndim else advantages[:, None]) <= 0",
        found_by=f"{FUZZ}::test_bad_sequences_off_the_policy_are_dropped",
    ),
    Fault(
        name="the share of correction forgets that the mean moves",
        at=f"{CORRECTION}::adaptive_weights",
        before="deviation - room * (mean - 1)",
        after="deviation",
        found_by=f"{FUZZ}::test_no_more_correction_than_leaves_enough_samples",
    ),
    Fault(
        name="an answer that ends too soon is rewarded",
        at=f"{EXAMPLE}::reward",
        before="(rollouts.tokens == solve(rollouts.prompts)) & rollouts.mask",
        after="(rollouts.tokens == solve(rollouts.prompts)) | ~rollouts.mask",
        found_by=f"{LOOP}::test_only_whole_answers_are_rewarded",
    ),
    Fault(
        name="the loss forgets its correction",
        at=f"{EXAMPLE}::Run.step",
        before="weights * gain",
        after="gain",
        found_by=f"{LOOP}::test_the_loss_is_weighted_by_the_correction",
    ),
    Fault(
        name="an engine that should be stale is refitted",
        at=f"{EXAMPLE}::Run.step",
        before="not self.variant.is_stale",
        after="True",
        found_by=f"{LOOP}::test_a_stale_engine_is_given_the_first_policy_alone",
    ),
    Fault(
        name="a run goes on without its optimizer",
        at=f"{EXAMPLE}::Run.load",
        before='self.optimizer.load_state_dict(state["optimizer"])',
        found_by=f"{LOOP}::test_a_run_goes_on_from_its_last_saved_step",
    ),
    Fault(
        name="the warm-up leaves rewards nothing to choose",
        at=f"{EXAMPLE}::demonstrate",
        before="torch.where(is_rising, answers, falling)",
        after="answers",
        found_by=f"{LOOP}::test_the_warm_up_shows_falling_order_more_often_than_the_right_one",
    ),
    Fault(
        name="times of runs beside others are summed up",
        at="examples/grpo_results.py::summarize",
        before='[run["steps"] for run in those if run["is_alone"]]',
        after='[run["steps"] for run in those]',
        found_by=f"{LOOP}::test_results_are_summed_up_over_seeds_and_drawn",
    ),
    Fault(
        name="a case that took long is timed again",
        at="fp8refit/bench/rollout.py::_time.timed",
        before="config.case_seconds or math.inf",
        after="math.inf",
        found_by="tests/bench/test_rollout.py::test_a_case_that_took_long_is_not_timed_again",
    ),
    Fault(
        name="cases of a benchmark share prompts, which engines have cached",
        at="fp8refit/bench/rollout.py::_time.seconds",
        before='f"{config.seed} {case} {next(runs)}"',
        after='f"{config.seed} {next(runs)}"',
        found_by="tests/bench/test_rollout.py::test_no_case_has_prompts_of_another",
    ),
    Fault(
        name="a benchmark that goes on measures all cases again",
        at="fp8refit/bench/rollout.py::run_rollout_bench",
        before="[case for case in config.every_case if case not in timed]",
        after="config.every_case",
        found_by="tests/bench/test_rollout.py::test_a_command_goes_on_with_what_its_file_lacks",
    ),
]
