"""Computations in a fork: processor time ends them, the clock does not."""

import os
import signal
import time

import pytest

from lightrft.rewards.worker import ReportedError
from lightrft.tools.rewards.fork import Fork


def behave(how):
    if how == "compute":
        while True:
            pass
    if how == "wait":
        time.sleep(0.5)
    if how == "exit":
        os._exit(0)
    if how == "end by a signal":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return how


@pytest.fixture
def fork():
    made = Fork(behave)
    yield made
    made.close()


def test_waiting_costs_no_processor_time_and_changes_no_result(fork):
    assert [fork.call("wait", seconds=0.2) for _ in range(2)] == ["wait", "wait"]


@pytest.mark.parametrize("how", ["compute", "exit", "end by a signal"])
def test_what_computes_too_long_or_ends_itself_has_no_result_and_harms_no_other(fork, how):
    assert fork.call(how, seconds=0.2) is None
    assert fork.call("next", seconds=0.2) == "next"


def test_a_fork_that_the_system_killed_is_an_error_and_no_result(fork):
    with pytest.raises(ReportedError, match="the system killed its process"):
        fork.call("killed", seconds=0.2)
    assert fork.call("next", seconds=0.2) == "next"
