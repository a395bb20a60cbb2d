"""A run of supervised fine-tuning that is killed again and again ends as one that was not.

Moments are counted in events of the run, the lines of its log, and spread over all of it; see
`tests.trainer.test_random_kills`, whose helpers these are.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from tests.ranks import run_multiprocess
from tests.trainer.test_random_kills import (
    NUM_STEPS,
    become_launcher,
    finish,
    import_modules,
    kill_once,
    num_events,
    require_same_end,
    result,
)

pytestmark = pytest.mark.shard("kills")


def settings(folder, name):
    return {
        "stage": "sft",
        "pretrain": str(folder / "model"),
        "prompt_data": str(folder / "rows.jsonl"),
        "output_dir": str(folder / name),
        "fsdp": True,
        "bf16": False,
        "packing_samples": True,
        "max_row_tokens": 64,
        "train_batch_size": 4,
        "micro_train_batch_size": 1,
        "actor_learning_rate": 1e-3,
        # The first batch of the second pass is the third step.
        "max_epochs": 2,
        "save_steps": 1,
        "async_save": True,
        "timeout_minutes": 2.0,
    }


def run_all(rank, world_size, folder, num_kills):
    from lightrft.tools.model_presets import write_tiny_model

    become_launcher()
    folder, dice, done = Path(folder), random.Random(num_kills), []
    write_tiny_model(folder / "model", "tiny-qwen3", seed=1)
    rows = [{"prompt": f"name {i} ", "completion": "ab" * (1 + i)} for i in range(2 * NUM_STEPS)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ends = {"models": ("_actor",), "logs": ("metrics.jsonl",)}
    whole, killed = settings(folder, "whole"), settings(folder, "killed")
    finish(whole)
    import_modules(Path(f"{whole['output_dir']}.modules"))
    expected = result(whole, **ends)
    assert len({json.dumps(row) for row in expected["metrics.jsonl"]}) == NUM_STEPS
    while len(done) < num_kills:
        found = kill_once(killed, num_events(whole), dice)
        if found is None:  # it had ended: compared, and another try from the beginning
            finish(killed)
            require_same_end(result(killed, **ends), expected, done)
            shutil.rmtree(killed["output_dir"])
        else:
            done.append(found)
    finish(killed)
    require_same_end(result(killed, **ends), expected, done)
    return len(done)


@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_killed_run_ends_as_the_run_that_nobody_killed(tmp_path, num_kills):
    done = run_multiprocess(run_all, 1, timeout_seconds=1700, args=(str(tmp_path), num_kills))
    assert done == [num_kills]
