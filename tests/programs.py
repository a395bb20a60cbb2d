"""Programs that tests start and wait for."""

import subprocess
import sys

from tests.machine import seconds


def run_program(*words, timeout_seconds=200.0, **options):
    """Run a program to its end; return its exit code and what it printed.

    Args:
        *words: The program and its arguments.
        timeout_seconds: Its deadline where nothing else runs.
        **options: Folder, environment and input, as for `subprocess.run`.
    """
    settings = {"capture_output": True, "text": True, "check": False, **options}
    return subprocess.run([*map(str, words)], timeout=seconds(timeout_seconds), **settings)


def run_python(*words, **options):
    """Run this environment's Python; see `run_program`."""
    return run_program(sys.executable, *words, **options)
