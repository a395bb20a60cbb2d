"""A soak run in a process of its own, and the bounds of what may grow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.programs import load_script

SCRIPT = Path(__file__).parents[2] / "scripts/soak.py"
# Per step, over the second half of the run: below them is the noise of allocators.
BOUNDS = {"memory_kib": 16.0, "descriptors": 0.01, "threads": 0.01, "temporary_files": 0.01}


@pytest.fixture(scope="session")
def script():
    """The module of the script."""
    return load_script(SCRIPT)


@pytest.fixture
def soak(tmp_path):
    """`soak(engine, steps)`: the slopes of a run of so many steps, maybe with a planted leak."""

    def run(engine, steps, leak_kib=0):
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        options = f"--engine {engine} --steps {steps} --leak {leak_kib}"
        done = subprocess.run(
            [sys.executable, SCRIPT, tmp_path / "soak", *options.split()],
            capture_output=True,
            text=True,
            timeout=3400,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found.pop("steps") == steps
        return found

    return run


@pytest.fixture(scope="session")
def too_steep():
    """`too_steep(slopes)`: the quantities that grow."""
    return lambda slopes: {name: value for name, value in slopes.items() if value > BOUNDS[name]}
