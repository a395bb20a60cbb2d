"""Runs in every order of rows that are killed at random events end as those that nobody killed."""

import random
from pathlib import Path

import pytest
from tests.ranks import run_multiprocess
from tests.run.test_orders import FORMS, SAMPLERS, options, write_all
from tests.runs import FEW, lines, write
from tests.stages import test_killed_stages
from tests.stages.test_killed_stages import end_of, kill_way
from tests.trainer.test_random_kills import NUM_STEPS, become_launcher, result

SPLIT = {"rollout_lag": 1, "rollout_ranks": 1, "engine_args": {"rows_at_once": "1"}}
WAYS = {name: FORMS[name] for name in ("streaming", "lag", "dynamic")} | {"split": SPLIT}
STAGES = ("sft", "prefer", "reward", "distill")
NUM_KILLS = 10


def end_of_samples(run):
    logs = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl", "draws.jsonl")
    return result(run, models=("_actor",), logs=logs)


def sampled(folder, sampler, way, name):
    return options(
        folder,
        "unused",
        sampler,
        output_dir=str(folder / f"{sampler} {way} {name}"),
        max_steps=NUM_STEPS,
        async_save=True,
        timeout_minutes=2.0,
        parity_check_steps=-1,
        **FEW,
        **WAYS[way],
    )


def on_rows(folder, sampler, way, name):
    order = options(folder, "unused", sampler, output_dir=str(folder / f"{sampler} {way} {name}"))
    run = test_killed_stages.settings(folder, way, name)
    return run | {each: order[each] for each in ("output_dir", *SAMPLERS[sampler])}


def kill_all(rank, world_size, folder, sampler, seed):
    """Kills runs in all ways, ten times in all."""
    become_launcher()
    dice, folder = random.Random(seed), write_all(Path(folder))
    rows = lines(folder / "rows.jsonl")
    write(folder / "rows.jsonl", [{**row, "w": n % 3} for n, row in enumerate(rows)])
    ways = [(way, sampled, end_of_samples) for way in WAYS]
    if sampler != "pools":  # it needs rewards
        ways += [(stage, on_rows, end_of) for stage in STAGES]
    done = 0
    for number, (way, settings, end) in enumerate(ways):
        runs = [settings(folder, sampler, way, name) for name in ("whole", "killed")]
        done += kill_way(*runs, end, len(range(number, NUM_KILLS, len(ways))), dice)
    return done


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.shard("kills")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_killed_run_goes_on_in_its_order(tmp_path, sampler):
    seed = random.randrange(2**32)
    args = (str(tmp_path), sampler, seed)
    assert run_multiprocess(kill_all, 1, timeout_seconds=1500, args=args) == [NUM_KILLS], seed
