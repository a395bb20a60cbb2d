"""Runs on given rows that are killed again and again end as those that nobody killed.

Moments are counted in events of the run, the lines of its log, and spread over all of it; see
`tests.trainer.test_random_kills`, whose helpers these are.
"""

import json
import random
import shutil
from pathlib import Path

import pytest
from tests.ranks import run_multiprocess
from tests.runs import row_options, tiny_models
from tests.stages.row_stages import write_rows
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

WAYS = {
    "sft": {"stage": "sft", "fsdp": True, "packing_samples": True},
    "prefer": {"stage": "prefer", "zero_stage": 2, "preference_loss": ("kto", "aot")},
    "adapters": {"stage": "prefer", "fsdp": True, "lora_rank": 4, "lora_dropout": 0.1},
    "reward": {"stage": "reward", "fsdp": True, "centering_coef": 0.01},
    "reward_zero3": {"stage": "reward", "zero_stage": 3},
    "distill": {"stage": "divergence", "zero_stage": 2, "teacher_form": "jsd"},
}
ENDS = {"models": ("_actor",), "logs": ("metrics.jsonl",)}


def settings(folder, way, name):
    options = row_options(
        folder / "model",
        folder / "rows.jsonl",
        folder / f"{way}_{name}",
        bf16=False,
        max_row_tokens=64,
        micro_train_batch_size=1,
        actor_learning_rate=1e-3,
        # The first batch of the second pass is the third step.
        max_epochs=2,
        save_steps=1,
        async_save=True,
        timeout_minutes=2.0,
    )
    teacher = {"teacher": str(folder / "teacher")} if way == "distill" else {}
    return options | teacher | WAYS[way]


def end_of(options):
    """All that a run has come to, its model's configuration included."""
    config = Path(options["output_dir"]) / "model/config.json"
    return result(options, **ENDS) | {"config": json.loads(config.read_text())}


def kill_way(whole, killed, end_of, num_kills, dice):
    """Kills one run again and again, lets it go on to its end, and compares."""
    done, way = [], Path(killed["output_dir"]).name
    finish(whole)
    import_modules(Path(f"{whole['output_dir']}.modules"))
    expected = end_of(whole)
    assert len({json.dumps(row) for row in expected["metrics.jsonl"]}) == NUM_STEPS
    while len(done) < num_kills:
        found = kill_once(killed, num_events(whole), dice)
        if found is None:  # it had ended: compared, and another try from the beginning
            finish(killed)
            require_same_end(end_of(killed), expected, (way, done))
            shutil.rmtree(killed["output_dir"])
        else:
            done.append(found)
    finish(killed)
    require_same_end(end_of(killed), expected, (way, done))
    print(f"{way}: {num_kills} kills after {done}", flush=True)
    return len(done)


def run_all(rank, world_size, folder, kills, seed):
    become_launcher()
    dice, folder = random.Random(seed), Path(folder)
    tiny_models(folder, "model", "teacher")
    write_rows(folder)
    return {
        way: kill_way(
            settings(folder, way, "whole"), settings(folder, way, "killed"), end_of, number, dice
        )
        for way, number in kills.items()
    }


FEW = {"sft": 3, "prefer": 3, "reward": 2, "distill": 2}
# 100, in two parts of less than an hour.
MANY = (
    {"sft": 20, "prefer": 15, "adapters": 15},
    {"reward": 15, "reward_zero3": 15, "distill": 20},
)


@pytest.mark.full
@pytest.mark.deepspeed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "num_kills",
    [
        FEW,
        pytest.param(MANY[0], marks=[pytest.mark.slow, pytest.mark.shard("kills_sft_prefer")]),
        pytest.param(MANY[1], marks=[pytest.mark.slow, pytest.mark.shard("kills_reward_distill")]),
    ],
    ids=["10 kills", "50 of sft and preferences", "50 of reward models and distillation"],
)
def test_a_killed_run_ends_as_the_run_that_nobody_killed(tmp_path, num_kills):
    seed = random.randrange(2**32)
    done = run_multiprocess(run_all, 1, timeout_seconds=3500, args=(str(tmp_path), num_kills, seed))
    assert done == [num_kills], seed
