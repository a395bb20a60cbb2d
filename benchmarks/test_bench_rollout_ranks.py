"""One rank that generates beside one that trains, against two that do both: tokens a second.

    OMP_NUM_THREADS=1 uv run pytest benchmarks/test_bench_rollout_ranks.py -s

Two processes in each form, on two cores, in turn. Responses have long-tailed lengths (lognormal,
cut at the limit), the same in every form. Time is that of whole steps, the first one left out.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.forked_run import Ranks
from tests.ranks import run_multiprocess
from tests.trainer.test_random_kills import become_launcher, import_modules, settings, write_inputs

NUM_STEPS, NUM_ROUNDS, LONGEST, MEDIAN, SIGMA = 6, 3, 96, 16, 1.0
FORMS = {
    "two ranks that do both": {},
    "one trains, one generates": {"rollout_lag": 1, "rollout_ranks": 1},
}
SECONDS = 600


def end_at_random_lengths(rank: int) -> None:
    """Responses end at lengths of their own; steps leave their times in a file."""
    from lightrft.engines.hf.engine import HFEngine
    from lightrft.run.loop import Loop

    submit, end_step = HFEngine.submit, Loop._end_step

    def length(request_id: int) -> int:
        drawn = random.Random(request_id).lognormvariate(0.0, SIGMA) * MEDIAN
        return max(1, min(LONGEST, round(drawn)))

    def bounded(engine, requests, params):
        cut = [replace(r, max_tokens=length(r.request_id)) for r in requests]
        submit(engine, cut, replace(params, ignore_eos=True))

    def timed(loop, step, metrics, *, is_last):
        found = end_step(loop, step, metrics, is_last=is_last)
        if loop.strategy.is_rank_0():
            path = Path(loop.stage.config.output_dir) / "times.jsonl"
            with path.open("a") as stream:
                stream.write(json.dumps(time.perf_counter()) + "\n")
        return found

    HFEngine.submit, Loop._end_step = bounded, timed


def measure(options) -> dict[str, float]:
    """Trained tokens a second of a run, and what its ranks received."""
    ranks = Ranks(options, 2, end_at_random_lengths)
    codes = ranks.wait(SECONDS)
    assert codes == [0, 0], ranks.log.read_text()[-4000:]
    folder = Path(options["output_dir"])
    times = [float(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(each["tokens_per_second"] * each["step_seconds"] for each in steps[1:])
    mean = {
        name: statistics.mean(each.get(name, 0.0) for each in steps[1:-1])
        for name in ("bridge/training_mb", "bridge/generating_mb", "wait_seconds", "train_seconds")
    }
    return {"tokens_per_second": tokens / (times[-1] - times[0]), **mean}


def measure_all(rank: int, world_size: int, folder: str) -> dict[str, list[dict[str, float]]]:
    become_launcher()
    place = Path(folder)
    write_inputs(place, 64)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in FORMS}
    for number in range(-1, NUM_ROUNDS):
        for index, (name, changes) in enumerate(FORMS.items()):
            options = settings(place, "fsdp", f"{index}_{number}")
            del options["critic_pretrain"]
            options |= {
                "advantage_estimator": "group_norm",
                "rollout_batch_size": 8,
                "n_samples_per_prompt": 4,
                "train_batch_size": 32,
                "micro_train_batch_size": 4,
                "generate_max_len": LONGEST,
                "max_steps": NUM_STEPS,
                "save_steps": -1,
                "num_threads": 1,
                "timeout_minutes": 10.0,
                **changes,
            }
            measured = measure(options)
            if number < 0:  # imports and first calls
                import_modules(Path(f"{options['output_dir']}.modules"))
            else:
                found[name].append(measured)
    return found


@pytest.mark.timeout(3000)
def test_a_rank_that_generates_beside_one_that_trains(tmp_path, capsys):
    (found,) = run_multiprocess(measure_all, 1, timeout_seconds=3000, args=(str(tmp_path),))
    with capsys.disabled():
        load = os.getloadavg()[0]
        print(f"\n{NUM_ROUNDS} rounds, load {load:.1f} on {os.cpu_count()} cores; medians")
        for name, rounds in found.items():
            middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
            print(f"{name:32}", {key: round(value, 3) for key, value in middle.items()})
