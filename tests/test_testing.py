"""The conformance kit passes on an engine that keeps its promises, and finds the fault of every broken one."""

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from importlib import import_module
from pkgutil import iter_modules

import pytest

from fp8refit import testing
from fp8refit.testing import CHECKS, CheckResult, Outcome, Subject, name_of, run_checks
from tests.broken_adapters import (
    BROKEN,
    AsynchronousEngine,
    AsynchronousSubject,
    Broken,
    ServingEngine,
    ServingModel,
    ServingSubject,
)

NAMES = [name_of(check) for check in CHECKS]
WHOLE = Broken(check="", message="")


@contextmanager
def under_test(broken: Broken):
    """A subject of that adapter, which is the only one installed."""

    class EntryPoint:
        name = "fake"

        def load(self) -> type[ServingEngine]:
            return broken.adapter()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [EntryPoint()])
        yield broken.subject(broken.model())


@pytest.fixture(scope="module")
def subject():
    with under_test(WHOLE) as subject:
        yield subject


@pytest.mark.parametrize("check", CHECKS)
def test_an_adapter_that_keeps_its_promises_passes(check, subject):
    check(subject)


@pytest.fixture(scope="module")
def asynchronous():
    broken = Broken(check="", message="", engine=AsynchronousEngine, subject=AsynchronousSubject)
    with under_test(broken) as subject, pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp8refit.testing.threads.OTHER_THREAD_S", 0.5)  # of a request that waits nothing else is seen
        yield subject
        subject.stop()


@pytest.mark.parametrize("check", CHECKS)
def test_an_asynchronous_engine_that_keeps_its_promises_passes(check, asynchronous):
    check(asynchronous)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: f"{broken.check}-{broken.name}")
def test_a_broken_adapter_is_found_out(broken):
    with under_test(broken) as subject:
        (result,) = run_checks(subject, only=[broken.check])
    assert result.outcome is Outcome.FAILED
    assert re.search(broken.message, result.message, re.DOTALL), result.message


def test_every_check_can_fail():
    assert {broken.check for broken in BROKEN} == set(NAMES)


def test_checks_are_independent_of_their_order(subject):
    results = [run_checks(subject, only=[name])[0] for name in reversed(NAMES)]
    assert {result.name for result in results if result.outcome is not Outcome.PASSED} == set()


def test_a_failing_check_leaves_the_engine_on_a_whole_policy():
    broken = next(broken for broken in BROKEN if broken.name == "FindsBadValuesTooLate")
    with under_test(broken) as subject:
        (result,) = run_checks(subject, only=[broken.check])
        assert result.outcome is Outcome.FAILED
        assert not subject.refitter().is_dirty
        assert subject.live_bytes() == subject.expected_bytes(subject.policy(0))


def test_every_check_is_listed_and_states_its_promise():
    modules = [import_module(f"fp8refit.testing.{module.name}") for module in iter_modules(testing.__path__)]
    written = {name for module in modules for name in vars(module) if name.startswith("check_")}
    assert {check.__name__ for check in CHECKS} == written
    assert {name for name in testing.__all__ if name.startswith("check_")} == written
    assert len(NAMES) == len(set(NAMES))
    assert all(check.__doc__ for check in CHECKS)


class Bare(Subject):
    """A subject with no capability besides those that every subject has."""

    def __init__(self, subject: ServingSubject) -> None:
        self.inner = subject
        self.engine = subject.engine

    policy = lambda self, seed: self.inner.policy(seed)  # noqa: E731
    live_bytes = lambda self: self.inner.live_bytes()  # noqa: E731
    expected_bytes = lambda self, policy: self.inner.expected_bytes(policy)  # noqa: E731
    places = lambda self: self.inner.places()  # noqa: E731
    generate = lambda self: self.inner.generate()  # noqa: E731
    drop_caches = lambda self: self.inner.drop_caches()  # noqa: E731
    num_unfinished = lambda self: self.inner.num_unfinished()  # noqa: E731


def test_what_a_subject_cannot_do_is_skipped_with_the_reason(subject):
    results = run_checks(Bare(subject))
    assert {result.name: result.message for result in results if result.outcome is Outcome.SKIPPED} == {
        "nothing_is_left_on_the_engine": "traces() cannot tell",
        "a_busy_engine_is_left_alone": "busy() cannot be brought about",
        "sleeping_weights_are_not_written": "asleep() cannot be brought about",
        "caches_that_stay_keep_the_old_policy": "unflushable() cannot be brought about",
        "memory_does_not_grow": "memory_bytes() cannot tell",
        "scales_fit_the_policy_that_is_served": "calibration() gives no batch",
        "calibrating_alone_gives_the_scales_of_a_refit": "calibration() gives no batch",
        "scales_stay_without_calibration": "kv_scales() cannot tell",
        "given_scales_are_written_exactly": "kv_scales() cannot tell",
        "scales_are_read": "kv_scales() cannot tell",
        "bad_scales_and_batches_write_nothing": "kv_scales() cannot tell",
        "a_dirty_engine_is_not_calibrated": "calibration() gives no batch",
    }
    assert {result.outcome for result in results} == {Outcome.PASSED, Outcome.SKIPPED}


def test_results_come_in_order_and_read_as_lines(subject):
    results = run_checks(subject, only=NAMES[2:4])
    assert [result.name for result in results] == NAMES[2:4]
    assert str(results[0]) == "passed  nothing_is_left_on_the_engine"
    failed = CheckResult(name="a", outcome=Outcome.FAILED, message="because")
    assert str(failed) == "failed  a: because"


def test_a_check_that_does_not_exist_is_no_pass(subject):
    with pytest.raises(ValueError, match="no such check: everything"):
        run_checks(subject, only=["everything"])


def test_whatever_an_adapter_raises_is_a_finding():
    class Crashes(ServingModel):
        def generate(self) -> list[str]:
            raise ZeroDivisionError("by zero")

    with under_test(Broken(check="", message="", model=Crashes)) as subject:
        (result,) = run_checks(subject, only=NAMES[:1])
    assert (result.outcome, result.message) == (Outcome.FAILED, "ZeroDivisionError: by zero")


def test_a_subject_that_looks_at_nothing_is_found_out(subject):
    class Empty(ServingSubject):
        def live_bytes(self):
            return {}

        def expected_bytes(self, policy):
            return {}

    class Mute(ServingSubject):
        def generate(self):
            return "yes"

    class Frozen(ServingSubject):
        def live_bytes(self):
            return {"weight": b""}

        expected_bytes = lambda self, policy: self.live_bytes()  # noqa: E731

    found = {
        kind.__name__: run_checks(kind(subject.model), only=NAMES[:1])[0].message for kind in (Empty, Mute, Frozen)
    }
    assert found == {
        "Empty": "live_bytes() gives no tensor",
        "Mute": "two policies gave the same answers: are they the engine's?",
        "Frozen": "two policies left the same live bytes: are these the live ones?",
    }


def test_a_refusal_that_takes_too_long_is_found_out(subject, monkeypatch):
    monkeypatch.setattr("fp8refit.testing.steps.REFUSAL_S", 0.0)
    (result,) = run_checks(subject, only=["bad_values_are_named_and_never_served"])
    assert re.search(r"refusing a request took 0\.0 s", result.message)


def test_the_kit_needs_no_test_framework():
    code = "import sys, fp8refit.testing; print(sorted({'pytest', 'transformers', 'vllm'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_second_refit_that_waits_for_the_first_is_found_out(subject, monkeypatch):
    class Queues(ServingSubject):
        turn = threading.Lock()

        def refit(self, *arguments, **options):
            with self.turn:
                return super().refit(*arguments, **options)

    monkeypatch.setattr("fp8refit.testing.threads.OTHER_THREAD_S", 0.1)
    (result,) = run_checks(Queues(subject.model), only=["one_refit_at_a_time"])
    assert result.message == "a second refit waited for the first instead of being refused at once"


def test_pytest_skips_what_a_check_skips(tmp_path):
    test = tmp_path / "test_skip.py"
    test.write_text(
        "from unittest import SkipTest\ndef test_a_check(): raise SkipTest('busy() cannot be brought about')"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, "-c", os.devnull, test]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "1 skipped" in result.stdout, result.stdout
