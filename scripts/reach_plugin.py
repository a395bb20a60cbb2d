"""Pytest plugin of `kill_table.py reach`: which lines of the packages each test runs.

coverage.py measures this process and every process that a test starts, with the test's name as the
context. It also writes what each test costs.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Generator
from pathlib import Path

import pytest
from coverage import Coverage

TEST = "LIGHTRFT_TEST"  # read by the coverage configuration of processes that are started
COSTS = "LIGHTRFT_COSTS"


def name_context() -> None:
    """Names the current test as the context of what this process runs from now on."""
    coverage = Coverage.current()
    if coverage is not None:
        coverage.switch_context(os.environ.get(TEST, ""))


def cpu_seconds() -> float:
    """Return what this process and the children that it waited for have computed."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Names the test, here and for the processes that it starts."""
    os.environ[TEST] = item.nodeid
    name_context()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Measures what the test's own function computes."""
    begin = cpu_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_seconds", cpu_seconds() - begin))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes what a test took."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # the controller gets all of them
        return
    line = {
        "test": report.nodeid,
        "when": report.when,
        "outcome": report.outcome,
        "seconds": round(report.duration, 3),
        "cpu_seconds": round(dict(report.user_properties).get("cpu_seconds", 0.0), 3),
    }
    with Path(os.environ[COSTS]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_configure() -> None:
    """Lets ranks, which are forked from a process that knows no test, name theirs."""
    from tests import ranks

    ranks._PRELOADED.append("reach_ranks")
