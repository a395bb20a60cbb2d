"""The commands of the first hour on a GPU, rehearsed without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.machine import seconds

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run_all.sh"


def rehearse(folder, *arguments):
    return subprocess.run(
        ["bash", str(SCRIPT), "--rehearse", "--out", str(folder), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds(500),
        check=False,
    )


@pytest.mark.slow
@pytest.mark.shard("planning")
@pytest.mark.timeout(600)
def test_b14_the_training_step_is_rehearsed_and_writes_its_phases(tmp_path):
    done = rehearse(tmp_path, "--seconds", "480", "training_step")
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads((tmp_path / "training_step.json").read_text())
    assert set(found["seconds"]) == {"score", "train", "optimizer"}
    assert all(value > 0 for value in found["seconds"].values())
    assert found["train_tflops_per_second"] > 0
    assert found["planned_bytes"] > 0
    assert (tmp_path / "steps.txt").read_text().startswith("training_step 0 ")


def test_b14_a_step_without_time_is_left_out_and_named(tmp_path):
    done = rehearse(tmp_path, "--seconds", "1", "linear_logprob", "doctor")
    lines = (tmp_path / "steps.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["linear_logprob", "doctor"]
    assert all("left out" in line for line in lines)
    assert done.returncode == 0


def test_b14_an_unknown_step_is_refused_with_those_there_are(tmp_path):
    done = rehearse(tmp_path, "speed")
    assert done.returncode == 2
    assert "unknown step speed: expected some of linear_logprob training_step" in done.stderr


def test_b14_the_headline_comes_first():
    text = SCRIPT.read_text()
    steps = (
        next(line for line in text.splitlines() if line.startswith("ALL=")).split('"')[1].split()
    )
    assert steps[:2] == ["linear_logprob", "training_step"]
    assert all(f"{name}()" in text for name in steps)
