"""A script of TRL learns as well once it is translated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.machine import seconds

pytest.importorskip("trl", reason="uv sync --group peers")
pytestmark = [pytest.mark.slow, pytest.mark.shard("peers")]
PARITY = Path(__file__).parents[1] / "learning_parity.py"


def test_sums_are_learnt_by_a_script_of_trl_and_by_its_translation(tmp_path):
    command = [sys.executable, str(PARITY), str(tmp_path / "parity"), "--seeds", "1"]
    subprocess.run(command, check=True, timeout=seconds(600))
    record = json.loads((tmp_path / "parity/learning_parity.json").read_text())
    # Over five seeds 0.945 was the least of both.
    assert record["start"] < 0.5
    assert min(record[side]["mean"] for side in ("trl", "lightrft")) > 0.85
