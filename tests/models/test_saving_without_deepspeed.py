"""What does not train with DeepSpeed does not import it."""

import pytest
from tests.programs import run_python

PROGRAM = """
import sys
from lightrft.tools.model_presets import write_tiny_model
write_tiny_model(sys.argv[1], "tiny-qwen3", seed=0)
from lightrft.models import Actor
from lightrft.strategy import get_fake_strategy
with get_fake_strategy({"bf16": False}) as strategy:
    model = strategy.prepare_model(Actor.from_pretrained(sys.argv[1]))
    strategy.save_model(model, None, sys.argv[1] + "/saved")
print("deepspeed" in sys.modules)
"""


@pytest.mark.full
@pytest.mark.deepspeed
def test_writing_loading_and_saving_a_model_does_not_import_deepspeed(tmp_path):
    done = run_python("-c", PROGRAM, str(tmp_path / "tiny"), timeout_seconds=240, code=0)
    assert done.stdout.splitlines()[-1] == "False"
    assert "accelerator" not in done.stderr
