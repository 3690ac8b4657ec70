"""A plugin of pytest: which lines each test runs, in its process and in those that it starts, and what it takes.

`line_map.py` loads it under `coverage`, whose context is the test. Seconds are of the processors, which do not depend on what
else the machine does. A test that does not pass is not written down.
"""

import json
import os
from pathlib import Path

import coverage
import pytest

OUT = "FP8REFIT_TEST_SECONDS"
"""The environment variable with the file for the seconds of each test."""
seconds: dict[str, float] = {}
unfit: set[str] = set()


def start_processes_in(context: str) -> None:
    """Name the context of processes that start from now on: those of a server of forks too, which is older than the test."""
    config = Path(os.environ["COVERAGE_PROCESS_START"])
    common = config.read_text().partition("context =")[0]
    config.write_text(f"{common}context = {context.replace('$', '$$')}\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    start_processes_in(item.nodeid)
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
    start_processes_in("")
    coverage.Coverage.current().switch_context("")
    passed = {test: taken for test, taken in seconds.items() if test not in unfit}
    Path(os.environ[OUT]).write_text(json.dumps(passed))
