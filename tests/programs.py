"""Programs that tests start and wait for, and scripts as modules."""

import importlib.util
import os
import subprocess
import sys

from tests.machine import seconds


def run_program(*words, code=None, timeout_seconds=200.0, **options):
    """Run a program to its end; return its exit code and what it printed.

    Args:
        *words: The program and its arguments.
        code: What its exit code has to be; None for any.
        timeout_seconds: Its deadline where nothing else runs.
        **options: Folder, environment and input, as for `subprocess.run`.
    """
    settings = {"capture_output": True, "text": True, "check": False, **options}
    done = subprocess.run([*map(str, words)], timeout=seconds(timeout_seconds), **settings)
    said = f"{words} ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
    assert code in (None, done.returncode), said
    return done


def run_python(*words, **options):
    """Run this environment's Python; see `run_program`."""
    return run_program(sys.executable, *words, **options)


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (self.proof,)


def load_script(path):
    """Import a script, which lies in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
