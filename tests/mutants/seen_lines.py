"""A plugin of pytest: which lines each test runs, in its process and in those that it starts, and what it takes.

`line_map.py` loads it under `coverage`, whose context is the test. Seconds are of the processors, which do not depend on what
else the machine does. A test that does not pass is not written down.
"""

import json
import os
from pathlib import Path

import coverage
import pytest

TEST = "FP8REFIT_TEST"
"""The environment variable that tells processes which test starts them."""
OUT = "FP8REFIT_TEST_SECONDS"
"""The environment variable with the file for the seconds of each test."""
seconds: dict[str, float] = {}
unfit: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    os.environ[TEST] = item.nodeid
    coverage.Coverage.current().switch_context(item.nodeid)
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        seconds[item.nodeid] = round(sum(os.times()[:4]) - before, 2)


def pytest_runtest_logreport(report):
    if report.outcome != "passed":
        unfit.add(report.nodeid)


def pytest_sessionfinish():
    coverage.Coverage.current().switch_context("")
    passed = {test: taken for test, taken in seconds.items() if test not in unfit}
    Path(os.environ[OUT]).write_text(json.dumps(passed))
