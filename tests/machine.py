"""Deadlines of tests, longer on a machine that is slow or busy at the moment.

A test that waits says for how long on a machine of which it has a processor to itself, and waits
`seconds(nominal)`. Processes that tests start take over the factor by the environment.
"""

import os
import subprocess
import sys
import time

# Read by `tests.ranks`, too.
FACTOR = "LIGHTRFT_TEST_TIME_FACTOR"
# A process start, some imports and a computation, alone on one core of 2020.
_JOB = "import asyncio, json, email.message; sum(i * i for i in range(300_000))"
_JOB_SECONDS = 0.15


def _measure():
    begin = time.monotonic()
    subprocess.run([sys.executable, "-I", "-c", _JOB], check=True)
    return (time.monotonic() - begin) / _JOB_SECONDS


_measured = float(os.environ[FACTOR]) if FACTOR in os.environ else max(1.0, _measure())


def slowness():
    """How much longer than alone a process takes now, at least 1."""
    waiting = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return max(_measured, waiting)


def publish():
    """Lets processes that are started from now on scale their deadlines."""
    os.environ[FACTOR] = f"{slowness():.2f}"


def seconds(nominal):
    """A deadline that takes `nominal` seconds where nothing else runs."""
    return nominal * slowness()


def wait_until(condition, nominal=60.0):
    """Return whether the condition came true in time."""
    limit = time.monotonic() + seconds(nominal)
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True
