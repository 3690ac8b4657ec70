"""The conformance kit: checks of what every adapter promises, run on one live engine.

An adapter's author describes an engine as a `Subject`. The kit runs good and bad refits, and checks that the engine
either serves one whole policy or refuses requests. It needs no test framework. Under pytest:

    import pytest
    from fp8refit.testing import CHECKS, Subject

    class MySubject(Subject):
        def __init__(self):
            self.engine = my_engine.boot("tiny-model")                # what a user passes to Refitter

        def policy(self, seed):                                       # a trainer's state dict
            return make_tiny_model(seed).state_dict()

        def live_bytes(self):                                         # read without fp8refit
            return {name: sha256_of(tensor) for name, tensor in self.engine.model.state_dict().items()}

        def expected_bytes(self, policy):                             # for example from a fresh engine
            return {name: sha256_of(tensor) for name, tensor in boot_from(policy).model.state_dict().items()}

        def places(self):
            return {name: (id(t), t.data_ptr(), t.shape, t.stride(), t.dtype)
                    for name, t in self.engine.model.named_parameters()}

        def generate(self):
            return [self.engine.generate(prompt, temperature=0) for prompt in PROMPTS]

        def drop_caches(self):
            self.engine.reset_prefix_cache()

        def num_unfinished(self):
            return self.engine.num_unfinished_requests()

    @pytest.fixture(scope="module")
    def subject():
        return MySubject()

    @pytest.mark.parametrize("check", CHECKS)
    def test_conformance(check, subject):
        check(subject)

Elsewhere, `print("\\n".join(map(str, run_checks(MySubject()))))`.

Each check begins and ends with a refit to a whole policy, so one engine serves all checks, in any order. A check is
skipped (`unittest.SkipTest`, which pytest understands) if the subject lacks a capability for it. The engine is used from
the calling thread; `check_one_refit_at_a_time` and `check_requests_meet_no_half_written_policy` also use a second one. A
request that hangs hangs the check, so run the kit with a timeout.
"""

from fp8refit.testing.failing import (
    check_a_refused_source_does_not_open_a_dirty_engine,
    check_a_source_that_fails_is_all_or_nothing,
    check_a_stream_that_ends_early_is_all_or_nothing,
    check_an_interrupt_is_all_or_nothing,
    check_bad_values_are_named_and_never_served,
)
from fp8refit.testing.kv_cache import (
    check_a_dirty_engine_is_not_calibrated,
    check_bad_scales_and_batches_write_nothing,
    check_calibrating_alone_gives_the_scales_of_a_refit,
    check_given_scales_are_written_exactly,
    check_scales_are_read,
    check_scales_fit_the_policy_that_is_served,
    check_scales_stay_without_calibration,
)
from fp8refit.testing.memory import (
    NUM_REFITS_FOR_MEMORY,
    check_memory_does_not_grow,
    check_the_source_is_left_as_it_was,
    check_the_source_is_let_go,
)
from fp8refit.testing.policies import Policy
from fp8refit.testing.refusing import (
    check_a_busy_engine_is_left_alone,
    check_caches_that_stay_keep_the_old_policy,
    check_misfits_are_told_all_at_once,
    check_sleeping_weights_are_not_written,
    check_strict_writes_nothing_bad,
)
from fp8refit.testing.runner import CHECKS, CheckResult, Outcome, name_of, run_checks
from fp8refit.testing.serving import (
    check_closing_keeps_version_and_state,
    check_live_tensors_keep_their_places,
    check_no_answer_from_the_old_policys_cache,
    check_nothing_is_left_on_the_engine,
    check_serves_exactly_the_new_policy,
    check_versions_count_up_and_are_shared,
)
from fp8refit.testing.sources import (
    check_every_kind_of_source_gives_the_same_bytes,
    check_prequantized_tensors_are_copied,
    check_tied_names_may_be_sent_or_not,
)
from fp8refit.testing.steps import REFUSAL_S
from fp8refit.testing.subject import AsyncSubject, Check, Subject
from fp8refit.testing.threads import (
    OTHER_THREAD_S,
    check_one_refit_at_a_time,
    check_requests_meet_no_half_written_policy,
)

__all__ = [
    "CHECKS",
    "NUM_REFITS_FOR_MEMORY",
    "OTHER_THREAD_S",
    "REFUSAL_S",
    "AsyncSubject",
    "Check",
    "CheckResult",
    "Outcome",
    "Policy",
    "Subject",
    "check_a_busy_engine_is_left_alone",
    "check_a_dirty_engine_is_not_calibrated",
    "check_a_refused_source_does_not_open_a_dirty_engine",
    "check_a_source_that_fails_is_all_or_nothing",
    "check_a_stream_that_ends_early_is_all_or_nothing",
    "check_an_interrupt_is_all_or_nothing",
    "check_bad_scales_and_batches_write_nothing",
    "check_bad_values_are_named_and_never_served",
    "check_caches_that_stay_keep_the_old_policy",
    "check_calibrating_alone_gives_the_scales_of_a_refit",
    "check_closing_keeps_version_and_state",
    "check_every_kind_of_source_gives_the_same_bytes",
    "check_given_scales_are_written_exactly",
    "check_live_tensors_keep_their_places",
    "check_memory_does_not_grow",
    "check_misfits_are_told_all_at_once",
    "check_no_answer_from_the_old_policys_cache",
    "check_nothing_is_left_on_the_engine",
    "check_one_refit_at_a_time",
    "check_prequantized_tensors_are_copied",
    "check_requests_meet_no_half_written_policy",
    "check_scales_are_read",
    "check_scales_fit_the_policy_that_is_served",
    "check_scales_stay_without_calibration",
    "check_serves_exactly_the_new_policy",
    "check_sleeping_weights_are_not_written",
    "check_strict_writes_nothing_bad",
    "check_the_source_is_left_as_it_was",
    "check_the_source_is_let_go",
    "check_tied_names_may_be_sent_or_not",
    "check_versions_count_up_and_are_shared",
    "name_of",
    "run_checks",
]
