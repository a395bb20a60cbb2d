"""Hooks of every test: shards, tiers, time limits, and reasons for which a test is skipped."""

import gc
import importlib.util
import os

import pytest
import pytest_timeout
from tests import machine, tiers

PROCESS_GROUP = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def _has(package):
    return importlib.util.find_spec(package) is not None


def _missing(marker):
    """Why tests with this marker cannot run here, or None if they can."""
    if marker == "gpu":
        import torch

        return None if torch.cuda.is_available() else "no CUDA device"
    packages = {"vllm": "vllm", "sglang": "sglang", "deepspeed": "deepspeed", "triton": "triton"}
    if marker in packages and not _has(packages[marker]):
        return f"package {packages[marker]} is not installed"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    """The time limit of a test, longer where the machine is busy."""
    limit = machine.seconds(settings.timeout)
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=limit))


# Seconds of tests that are quick and take long, by the speed of this machine.
LONG = {}
# File of every collected test, whether it is slow, and its shard.
COLLECTED = pytest.StashKey[list[tuple[str, bool, str | None]]]()


def pytest_addoption(parser):
    parser.addoption("--shard", help="only tests of this shard: .ci/slow lists them")


def shard_of(item):
    marker = item.get_closest_marker("shard")
    return None if marker is None else marker.args[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Takes a shard's tests, and skips those whose hardware or package is missing."""
    tiers.mark_long_tables(items)
    config.stash[COLLECTED] = [
        (str(item.path), item.get_closest_marker("slow") is not None, shard_of(item))
        for item in items
    ]
    wanted = config.getoption("--shard")
    if wanted is not None:
        known = {shard for _, _, shard in config.stash[COLLECTED] if shard is not None}
        if wanted not in known:
            raise pytest.UsageError(f"no shard is called {wanted}: expected {sorted(known)}")
        config.hook.pytest_deselected(items=[i for i in items if shard_of(i) != wanted])
        items[:] = [item for item in items if shard_of(item) == wanted]
    reasons = {name: _missing(name) for name in ("gpu", "vllm", "sglang", "deepspeed", "triton")}
    for item in items:
        for marker, reason in reasons.items():
            if reason is not None and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A command in this process names its process group; later tests start without one.

    Around the test's fixtures of every scope, which a fixture of a function would not be.
    """
    before = {name: os.environ.pop(name, None) for name in PROCESS_GROUP}
    machine.publish()
    try:
        return (yield)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def pytest_collection_finish():
    # Modules and collected tests live to the end: collections need not walk a million objects.
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report):
    """Notes tests that are quick by their markers and take long."""
    # Those of an engine or a GPU are no part of the quick command.
    others = {"full", "slow", "vllm", "sglang", "gpu"}
    if report.when == "call" and not others & set(report.keywords):
        limit = machine.seconds(tiers.QUICK_SECONDS)
        if report.duration > limit:
            LONG[report.nodeid] = report.duration / machine.slowness()


def pytest_sessionfinish(session):
    """Fails a run of the tests with a quick one that takes far too long."""
    if max(LONG.values(), default=0.0) > tiers.MOST_SECONDS and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Names quick tests that take long."""
    for name, seconds in sorted(LONG.items(), key=lambda item: -item[1]):
        verb = "must" if seconds > tiers.MOST_SECONDS else "may have to"
        terminalreporter.write_line(
            f"{name} took {seconds:.0f} s by the speed of this machine: a quick test takes at most "
            f"{tiers.QUICK_SECONDS:.0f} s, it {verb} be marked full"
        )


@pytest.fixture(scope="session")
def collected(pytestconfig):
    """Return the file of every collected test, whether it is slow, and its shard."""
    return pytestconfig.stash[COLLECTED]
