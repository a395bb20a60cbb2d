"""Forms of a step against one that waits for all of its responses: trained tokens a second.

    OMP_NUM_THREADS=1 uv run pytest benchmarks/test_bench_rollout_ranks.py -s

Two processes in each form, on two cores, in turn: one rank that generates beside one that trains
against two that do both, and streaming on two ranks against steps that wait. Responses have
long-tailed lengths (lognormal, cut at the limit), the same in every form. Time is that of whole
steps, of the first comparison without the first one; a streaming run is timed as a whole, with the
filling of its engines and their draining, and trains on the same lengths. The ledger gate is off,
for these responses are made to end. The figure of merit is the median of the rounds' ratios.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from tests.forked_run import Ranks
from tests.ranks import run_multiprocess
from tests.trainer.test_random_kills import become_launcher, import_modules, settings, write_inputs

GROUP_SIZE, NUM_STEPS, NUM_ROUNDS, LONGEST, MEDIAN, SIGMA = 4, 6, 3, 256, 20, 1.0
FORMS = {
    "two ranks that do both": {},
    "one trains, one generates": {"rollout_lag": 1, "rollout_ranks": 1},
}
# Some of the responses of a step are long in every step; the start and the end are few of them.
MORE = {"micro_train_batch_size": 16, "max_steps": 24}
STREAMED = {"stream_chunk": LONGEST // 8, "stream_prompts": 32, "max_staleness": 8}
STREAMING = {"waits for all": MORE, "streaming": MORE | STREAMED}
RATIOS = Path(__file__).parent / "ratios.toml"
TOLERANCE = 1.25
SECONDS = 600


def end_at_random_lengths(rank: int) -> None:
    """Responses end at lengths of their own; steps leave their times in a file."""
    from lightrft.engines.hf.engine import HFEngine
    from lightrft.run.loop import Loop

    submit, poll = HFEngine.submit, HFEngine.poll
    next_step, end_step = Loop.next_step, Loop._end_step
    left: dict[int, int] = {}

    def length(request_id: int) -> int:
        drawn = random.Random(request_id).lognormvariate(0.0, SIGMA) * MEDIAN
        return max(1, min(LONGEST, round(drawn)))

    def bounded(engine, requests, params):
        """Of a group alike, and in streaming what is left of a response."""
        if params.temperature == 0.0:  # the canary
            submit(engine, requests, params)
            return
        is_part, cut = params.n == 1, []
        for each in requests:
            whole = length(each.request_id // GROUP_SIZE if is_part else each.request_id)
            most = left.setdefault(each.request_id, whole) if is_part else whole
            cut.append(replace(each, max_tokens=min(each.max_tokens or params.max_tokens, most)))
        submit(engine, cut, replace(params, ignore_eos=True))

    def ended(engine):
        """A response that has its length is whole."""
        found = []
        for each in poll(engine):
            if each.request_id in left:
                left[each.request_id] -= len(each.output_token_ids)
                if left[each.request_id] == 0:
                    del left[each.request_id]
                    each = replace(each, finish_reason="stop")
            found.append(each)
        return found

    def note(loop):
        if loop.strategy.is_rank_0():
            path = Path(loop.stage.config.output_dir) / "times.jsonl"
            with path.open("a") as stream:
                stream.write(json.dumps(time.perf_counter()) + "\n")

    def begun(loop):
        if not (Path(loop.stage.config.output_dir) / "times.jsonl").exists():
            note(loop)
        return next_step(loop)

    def timed(loop, step, metrics, *, is_last):
        found = end_step(loop, step, metrics, is_last=is_last)
        note(loop)
        return found

    HFEngine.submit, HFEngine.poll = bounded, ended
    Loop.next_step, Loop._end_step = begun, timed


def measure(options, *, first: int) -> dict[str, float]:
    """Trained tokens a second of a run from a step on, and what its ranks received."""
    ranks = Ranks(options, 2, end_at_random_lengths)
    codes = ranks.wait(SECONDS)
    assert codes == [0, 0], ranks.log.read_text()[-4000:]
    folder = Path(options["output_dir"])
    times = [float(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(each["tokens_per_second"] * each["step_seconds"] for each in steps[first:])
    mean = {
        name: statistics.mean(each.get(name, 0.0) for each in steps[1:-1])
        for name in ("bridge/training_mb", "bridge/generating_mb", "wait_seconds", "train_seconds")
    }
    return {"tokens_per_second": tokens / (times[-1] - times[first]), **mean}


def measure_all(
    rank: int, world_size: int, folder: str, forms: dict[str, dict[str, int]], first: int
) -> dict[str, list[dict[str, float]]]:
    become_launcher()
    place = Path(folder)
    write_inputs(place, 256)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in forms}
    for number in range(-1, NUM_ROUNDS):
        for index, (name, changes) in enumerate(forms.items()):
            options = settings(place, "fsdp", f"{index}_{number}")
            del options["critic_pretrain"]
            options |= {
                "advantage_estimator": "group_norm",
                "rollout_batch_size": 8,
                "n_samples_per_prompt": GROUP_SIZE,
                "train_batch_size": 32,
                "micro_train_batch_size": 4,
                "generate_max_len": LONGEST,
                "max_steps": NUM_STEPS,
                "save_steps": -1,
                "num_threads": 1,
                "ledger_gate": False,
                "timeout_minutes": 10.0,
                **changes,
            }
            measured = measure(options, first=first)
            if number < 0:  # imports and first calls
                import_modules(Path(f"{options['output_dir']}.modules"))
            else:
                found[name].append(measured)
    return found


def compare(tmp_path, capsys, forms, *, first) -> float:
    """The median over rounds of the second form's speed over the first one's."""
    given = (str(tmp_path), forms, first)
    (found,) = run_multiprocess(measure_all, 1, timeout_seconds=3000, args=given)
    base, other = ([each["tokens_per_second"] for each in rounds] for rounds in found.values())
    ratio = statistics.median(b / a for a, b in zip(base, other, strict=True))
    with capsys.disabled():
        load = os.getloadavg()[0]
        print(f"\n{NUM_ROUNDS} rounds, load {load:.1f} on {os.cpu_count()} cores; medians")
        for name, rounds in found.items():
            middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
            print(f"{name:32}", {key: round(value, 3) for key, value in middle.items()})
        print(f"ratio {ratio:.2f}")
    return ratio


@pytest.mark.timeout(3000)
def test_a_rank_that_generates_beside_one_that_trains(tmp_path, capsys):
    compare(tmp_path, capsys, FORMS, first=1)


@pytest.mark.timeout(3000)
def test_streaming_beside_steps_that_wait(tmp_path, capsys):
    ratio = compare(tmp_path, capsys, STREAMING, first=0)
    committed = tomllib.loads(RATIOS.read_text())["streaming_over_waiting_for_all"]["ratio"]
    assert ratio >= committed / TOLERANCE
