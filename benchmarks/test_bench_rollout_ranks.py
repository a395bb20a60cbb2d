"""Forms of a step against one that waits for all of its responses: trained tokens a second.

    OMP_NUM_THREADS=1 uv run pytest benchmarks/test_bench_rollout_ranks.py -s

Two processes in each form, on two cores, in turn. Each response has a length of its own, the same
in every form, from a long tail (lognormal, cut at eight times the mean); training packs them. A run
is timed as a whole, with the filling of its engines and their draining. The ledger gate is off, for
these responses are made to end. The figure of merit is the median of the rounds' ratios.
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

GROUP_SIZE, NUM_STEPS, NUM_ROUNDS, LONGEST, MEDIAN, SIGMA = 4, 24, 5, 256, 20, 1.0
STREAMED = {"stream_chunk": LONGEST // 8, "stream_prompts": 32, "max_staleness": 8}
SPLIT = {"rollout_lag": 1, "rollout_ranks": 1}
FORMS = {
    "waits_for_all": {},
    "streaming": STREAMED,
    "one_generates": SPLIT,
    "one_generates_streaming": SPLIT | STREAMED,
}
SHOWN = (
    *("rollout_seconds", "weight_sync_seconds", "wait_seconds", "train_seconds"),
    *("bridge/training_mb", "bridge/generating_mb"),
)
RATIOS = Path(__file__).parent / "ratios.toml"
TOLERANCE = 1.25
SECONDS = 600


def end_at_random_lengths(rank: int) -> None:
    """Responses end at lengths of their own; steps leave their times in a file."""
    from lightrft.engines.hf.engine import HFEngine
    from lightrft.run.loop import Loop

    stream = HFEngine.stream_rows
    next_step, end_step = Loop.next_step, Loop._end_step
    left: dict[int, int] = {}

    def length(sample: int) -> int:
        drawn = random.Random(sample).lognormvariate(0.0, SIGMA) * MEDIAN
        return max(1, min(LONGEST, round(drawn)))

    def bounded(engine, rows, params):
        """Each response has the same length in every form, of which streaming samples parts."""
        if params.temperature == 0.0:  # the canary
            yield from stream(engine, rows, params)
            return
        samples = {row: row.request_id * params.n + row.sample_index for row in rows}
        for sample in samples.values():
            left.setdefault(sample, length(sample))
        cut = {
            replace(row, max_tokens=min(row.max_tokens, left[sample])): (row, sample)
            for row, sample in samples.items()
        }
        for ended in stream(engine, list(cut), replace(params, ignore_eos=True)):
            found = []
            for row, raw in ended:
                row, sample = cut[row]
                left[sample] -= len(raw.token_ids)
                if left[sample] == 0:
                    del left[sample]
                    raw = replace(raw, finish_reason="stop")
                found.append((row, raw))
            yield found

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

    HFEngine.stream_rows = bounded
    Loop.next_step, Loop._end_step = begun, timed


def measure(options) -> dict[str, float]:
    """Trained tokens a second of a run, and means of its steps."""
    ranks = Ranks(options, 2, end_at_random_lengths)
    codes = ranks.wait(SECONDS)
    assert codes == [0, 0], ranks.log.read_text()[-4000:]
    folder = Path(options["output_dir"])
    times = [float(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(each["tokens_per_second"] * each["step_seconds"] for each in steps)
    mean = {name: statistics.mean(each.get(name, 0.0) for each in steps[1:-1]) for name in SHOWN}
    return {"tokens_per_second": tokens / (times[-1] - times[0]), **mean}


def measure_all(rank: int, world_size: int, folder: str) -> dict[str, list[dict[str, float]]]:
    become_launcher()
    place = Path(folder)
    write_inputs(place, 256)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in FORMS}
    for number in range(-1, NUM_ROUNDS):
        for name, changes in FORMS.items():
            options = settings(place, "fsdp", f"{name}_{number}")
            del options["critic_pretrain"]
            options |= {
                "advantage_estimator": "group_norm",
                "rollout_batch_size": 8,
                "n_samples_per_prompt": GROUP_SIZE,
                "train_batch_size": 32,
                "micro_train_batch_size": 16,
                "packing_samples": True,
                "generate_max_len": LONGEST,
                "max_steps": NUM_STEPS,
                "save_steps": -1,
                "num_threads": 1,
                "ledger_gate": False,
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
def test_forms_beside_steps_that_wait(tmp_path, capsys):
    given = (str(tmp_path),)
    (found,) = run_multiprocess(measure_all, 1, timeout_seconds=3000, args=given)
    speeds = {form: [each["tokens_per_second"] for each in runs] for form, runs in found.items()}
    base = speeds["waits_for_all"]
    committed = tomllib.loads(RATIOS.read_text())
    with capsys.disabled():
        load = os.getloadavg()[0]
        print(f"\n{NUM_ROUNDS} rounds, load {load:.1f} on {os.cpu_count()} cores; medians")
        for form, runs in found.items():
            middle = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
            print(f"{form:24}", {key: round(value, 3) for key, value in middle.items()})
        ratios = {
            form: statistics.median(b / a for a, b in zip(base, other, strict=True))
            for form, other in speeds.items()
        }
        print("ratios", {form: round(ratio, 2) for form, ratio in ratios.items()})
    for form in [form for form in FORMS if FORMS[form]]:
        assert ratios[form] >= committed[f"{form}_over_waiting_for_all"]["ratio"] / TOLERANCE
