"""What does not train with DeepSpeed does not import it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from lightrft.models.presets import write_tiny_model
write_tiny_model(sys.argv[1], "tiny-qwen3", seed=0)
print("deepspeed" in sys.modules)
"""


@pytest.mark.deepspeed
def test_writing_a_model_does_not_import_deepspeed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "tiny")],
        capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "False"
    assert "accelerator" not in done.stderr
