"""Runs scripts in processes of their own, in which torch finds a fake H100."""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
DEFAULTS = {
    "rows": 1,
    "tokens": 1024,
    "prompt": 1,
    "padding": 0,
    "packed": False,
    "masked": False,
    "lora": False,
    "checkpointing": False,
    "world": 0,
    "micro_batches": 1,
}


@functools.cache
def preloaded():
    """Path of the compiled fake runtime."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the fake CUDA runtime")
    import torch
    import triton

    if torch.version.cuda is None:
        pytest.skip("this torch was built without CUDA")
    packages = Path(torch.__file__).parent.parent
    headers = [Path(triton.__file__).parent / "backends/nvidia/include"]
    headers += sorted(packages.glob("nvidia/cu*/include"))
    # The name by which torch opens the driver: it finds the one that is loaded already.
    target = Path(tempfile.mkdtemp(prefix="fake-cuda-")) / "libcuda.so.1"
    includes = [flag for folder in headers for flag in ("-I", str(folder))]
    subprocess.run(
        [
            compiler,
            "-shared",
            "-fPIC",
            "-w",
            "-Wl,-soname,libcuda.so.1",
            *includes,
            "-o",
            str(target),
            str(FOLDER / "fake_device.c"),
        ],
        check=True,
    )
    return target


def trace(*cases, timeout=240):
    """What `trace_update.py` saw of each case; keys that a case lacks are those of `DEFAULTS`."""
    whole = [{**DEFAULTS, **case} for case in cases]
    return run("trace_update.py", json.dumps(whole), timeout=timeout)


def run(script, *arguments, timeout=240):
    """What a script beside this file prints last, as JSON."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        env={**os.environ, "LD_PRELOAD": str(preloaded()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
