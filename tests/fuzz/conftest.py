"""How far every fuzzer here goes: it says what may happen, and never how many examples of it are tried.

FP8REFIT_FUZZ names the profile. `ci`, the default: few examples, the same every time; `planted`: those, and the first that
fails is told as it is. `long`: as many as FP8REFIT_FUZZ_EXAMPLES says, other ones with every `--hypothesis-seed`;
`run_fuzz.py` goes on so for a given time.
"""

import os
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, Phase, settings

# How long an example takes to make says nothing on a machine that is busy.
COMMON = settings(deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", COMMON, derandomize=True, max_examples=25, stateful_step_count=20)
settings.register_profile("planted", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.register_profile(
    "long",
    COMMON,
    derandomize=False,
    max_examples=int(os.environ.get("FP8REFIT_FUZZ_EXAMPLES", "1000")),
    stateful_step_count=60,
)


@contextmanager
def profile():
    """The profile, for as long as what is here is collected or run: other folders keep their own settings."""
    before = settings.get_current_profile_name()
    settings.load_profile(os.environ.get("FP8REFIT_FUZZ", "ci"))
    try:
        yield
    finally:
        settings.load_profile(before)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    with profile():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    with profile():
        return (yield)
