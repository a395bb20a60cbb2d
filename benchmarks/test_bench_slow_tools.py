"""Episodes whose tools wait: one round of calls, calls beside sampling, and a whole step.

    OMP_NUM_THREADS=1 uv run pytest benchmarks/test_bench_slow_tools.py -s

A round is one call of each of 32 episodes that waits for 0.5 s, as a coroutine in one worker and as
a function in several. Calls beside sampling begin when their turns end, and are compared with calls
that begin when all turns of their round have ended. A step is that of a tiny model, each episode
with two calls: on one rank that generates beside one that trains, and on one rank whose open
episodes wait for their tools while others go on. It is compared with the larger of two times: what
the same step takes on one rank, with tools that wait for nothing, and the time of all tools over
how many run at once.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.forked_run import Ranks
from tests.ranks import run_multiprocess
from tests.rollout.stages import Stage, call
from tests.runs import TEMPLATE
from tests.trainer.test_killed_episodes import let_random_models_call, settings
from tests.trainer.test_random_kills import become_launcher, import_modules, write_inputs

from lightrft.config import TrainConfig
from lightrft.rollout.environments.pool import EnvironmentPool

NUM_EPISODES, TOOL_SECONDS, NUM_ROUNDS, NUM_STEPS, NUM_CALLS = 32, 0.5, 2, 6, 2
TURN_SECONDS = 0.05
# Beside the tool's time: episodes of one worker at once, or of several workers.
MAX_STEP = 1.15
MAX_ROUND = {"coroutines, 1 worker": 2.0, "functions, 16 workers": 4.0}
ENVIRONMENT = """
import asyncio
import time


class Waiting:
    def reset(self, **row):
        self.state = 0

    async def mix(self, number: int) -> str:
        \"\"\"Mix a number in.

        Args:
            number: Any.
        \"\"\"
        await asyncio.sleep({seconds})
        return self._mixed(number)

    def _mixed(self, number):
        self.state = (self.state * 31 + number + 7) % 1009
        return str(self.state)

    def get_reward(self) -> float:
        return float(self.state % 5)


class Blocking(Waiting):
    def mix(self, number: int) -> str:
        \"\"\"Mix a number in.

        Args:
            number: Any.
        \"\"\"
        time.sleep({seconds})
        return self._mixed(number)
"""


SLOW_TOOL = """
import time


def slow(number: int) -> str:
    \"\"\"Wait.

    Args:
        number: Any.
    \"\"\"
    time.sleep(0.05)
    return str(number)
"""


def write_environment(folder, name, seconds):
    path = folder / f"{name}.py"
    path.write_text(ENVIRONMENT.format(seconds=seconds))
    return path


def a_round(pool):
    """Seconds until every episode has had one call answered."""

    def begin(number, host):
        host.ask("reset", draws=(number, -1), row={})

    def call(number, host):
        asked = {"name": "mix", "arguments": {"number": number}}
        return host.ask("call", draws=(number, 0), **asked)

    numbers = range(NUM_EPISODES)
    begun = [pool.begin(number, partial(begin, number)) for number in numbers]
    assert not any(future.result() for future in begun)
    start = time.perf_counter()
    called = [pool.begin(number, partial(call, number)) for number in numbers]
    texts = [future.result()["text"] for future in called]
    seconds = time.perf_counter() - start
    assert texts == [str(number + 7) for number in numbers]
    return seconds


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name, workers", [("Waiting", 1), ("Blocking", 8), ("Blocking", 16)])
def test_a_round_of_calls(benchmark, tmp_path, capsys, name, workers):
    path = write_environment(tmp_path, "slow", TOOL_SECONDS)
    options = {"environment": f"{path}:{name}", "apply_chat_template": True}
    pool = EnvironmentPool(TrainConfig(environment_workers=workers, **options))
    try:
        a_round(pool)
        rounds = [a_round(pool) for _ in range(NUM_ROUNDS)]
        benchmark.pedantic(a_round, args=(pool,), rounds=1, iterations=1)
    finally:
        pool.close()
    ratio = statistics.median(rounds) / TOOL_SECONDS
    kind = "coroutines" if name == "Waiting" else "functions"
    form = f"{kind}, {workers} worker{'s' * (workers > 1)}"
    with capsys.disabled():
        load = os.getloadavg()[0]
        shown = " ".join(f"{seconds:.2f}" for seconds in rounds)
        print(f"\n{form}: {ratio:.2f} of the tool's time ({shown} s), load {load:.1f}")
    benchmark.extra_info.update(form=form, ratio=ratio, rounds=rounds)
    assert ratio <= MAX_ROUND.get(form, float("inf"))


@pytest.mark.timeout(900)
def test_calls_beside_sampling(benchmark, tmp_path, capsys, monkeypatch):
    """A turn and a call take 0.05 s each; one worker makes the calls one after the other."""
    path = tmp_path / "tools.py"
    path.write_text(SLOW_TOOL)

    def script(request_id):
        time.sleep(TURN_SECONDS)
        return [call("slow", number=request_id)] * NUM_CALLS + ["done"]

    rows = [{"input": f"Find it {number}."} for number in range(NUM_EPISODES // 2)]
    stage = Stage(tmp_path, script, rows=rows, environment=None, tools=(f"{path}:slow",))
    generate = type(stage.strategy.session).gather_and_generate
    times: dict[str, list[float]] = {"at the end": [], "beside": []}
    tells = {"at the end": lambda on_finished: None, "beside": lambda on_finished: on_finished}
    stage.sample()
    for _ in range(NUM_ROUNDS + 1):
        for name, tell in tells.items():
            monkeypatch.setattr(
                type(stage.strategy.session),
                "gather_and_generate",
                lambda session, batch, params, on_finished, tell=tell, **options: generate(
                    session, batch, params, tell(on_finished), **options
                ),
            )
            start = time.perf_counter()
            stage.sample()
            times[name].append(time.perf_counter() - start)
    benchmark.pedantic(stage.sample, rounds=1, iterations=1)
    end, beside = (statistics.median(each) for each in times.values())
    with capsys.disabled():
        print(f"\ncalls at the end of a round {end:.2f} s, beside sampling {beside:.2f} s")
    benchmark.extra_info.update(times=times, ratio=beside / end)
    stage.environments.close()


SPLIT = {"rollout_lag": 1, "rollout_ranks": 1}
LATE_JOIN = {**SPLIT, "late_join": True}
# A chunk holds a turn.
STREAMED = {"stream_chunk": 64, "max_steps": 20}
LAGS = {
    1: {"tool_lag": 1, "max_staleness": 6, **STREAMED},
    2: {"tool_lag": 2, "max_staleness": 9, **STREAMED},
}
FORMS = {
    "no waits": {"environment_workers": 1},
    "split ranks, coroutines": {"environment_workers": 1, **SPLIT},
    "split ranks, 8 workers": {"environment_workers": 8, **LATE_JOIN},
    "split ranks, 16 workers": {"environment_workers": 16, **LATE_JOIN},
    "tool_lag 1, coroutines": {"environment_workers": 1, **LAGS[1]},
    "tool_lag 2, coroutines": {"environment_workers": 1, **LAGS[2]},
    "tool_lag 2, 16 workers": {"environment_workers": 16, **LAGS[2]},
}


def measure(options, num_ranks, num_stops) -> float:
    """Median seconds from one step's end to the next one's, while as much is open as may be."""
    ranks = Ranks(options, num_ranks, partial(prepare, num_stops))
    codes = ranks.wait(600)
    assert codes == [0] * num_ranks, ranks.log.read_text()[-4000:]
    times = [float(line) for line in Path(options["output_dir"], "times").read_text().split()]
    is_streamed = "stream_chunk" in options
    found = [b - a for a, b in itertools.pairwise(times)]
    return statistics.median(found[7:-7] if is_streamed else found[1:])


def prepare(num_stops: int, rank: int) -> None:
    """Every turn calls, and ends at one of so many tokens; steps leave their times in a file."""
    import lightrft.rollout.sampler as sampling
    from lightrft.run.loop import Loop

    let_random_models_call()
    own = sampling.training_params
    sampling.training_params = lambda config: replace(
        own(config), stop_token_ids=tuple(range(num_stops))
    )
    end_step = Loop._end_step

    def timed(loop, step, metrics, *, is_last):
        found = end_step(loop, step, metrics, is_last=is_last)
        if loop.strategy.is_rank_0():
            with Path(loop.stage.config.output_dir, "times").open("a") as stream:
                stream.write(f"{time.perf_counter()}\n")
        return found

    Loop._end_step = timed


def measure_all(rank: int, world_size: int, folder: str, num_stops: int) -> dict[str, list[float]]:
    become_launcher()
    place = Path(folder)
    write_inputs(place, 256)
    (place / "template.jinja").write_text(TEMPLATE)
    found: dict[str, list[float]] = {name: [] for name in FORMS}
    for number in range(-1, NUM_ROUNDS):
        for index, (name, changes) in enumerate(FORMS.items()):
            num_ranks, seconds = 1 + ("rollout_ranks" in changes), TOOL_SECONDS * (index > 0)
            path = write_environment(place, f"tools_{index}", seconds)
            kind = "Blocking" if name.endswith("workers") else "Waiting"
            options = settings(place, f"run_{index}_{number}") | {
                "environment": f"{path}:{kind}",
                "advantage_estimator": "group_norm",
                "rollout_batch_size": NUM_EPISODES // 4,
                "n_samples_per_prompt": 4,
                "train_batch_size": NUM_EPISODES,
                "micro_train_batch_size": 8,
                "generate_max_len": 64,
                "max_turns": NUM_CALLS + 1,
                "max_steps": NUM_STEPS,
                "save_steps": -1,
                "num_threads": 1,
                "timeout_minutes": 10.0,
                **changes,
            }
            measured = measure(options, num_ranks, num_stops)
            if number < 0:  # imports and first calls
                import_modules(Path(f"{options['output_dir']}.modules"))
            else:
                found[name].append(measured)
    return found


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("num_stops", [90, 8], ids=["short turns", "long turns"])
def test_a_step_with_slow_tools(tmp_path, capsys, num_stops):
    given = (str(tmp_path), num_stops)
    (found,) = run_multiprocess(measure_all, 1, timeout_seconds=2900, args=given)
    alone = found.pop("no waits")
    ratios: dict[str, float] = {}
    lines = [f"no waits: {statistics.median(alone):.2f} s"]
    for name, steps in found.items():
        num_open = 2 * NUM_EPISODES if "stream_chunk" in FORMS[name] else NUM_EPISODES
        is_coroutine = name.endswith("coroutines")
        at_once = num_open if is_coroutine else FORMS[name]["environment_workers"]
        tools = NUM_EPISODES * NUM_CALLS * TOOL_SECONDS / at_once
        bounds = [max(each, tools) for each in alone]
        ratio = statistics.median(a / b for a, b in zip(steps, bounds, strict=True))
        shown = f"{statistics.median(steps):.2f} s, tools {tools:.2f} s"
        lines.append(f"{name}: {shown}, ratio {ratio:.2f}")
        ratios[name] = ratio
    with capsys.disabled():
        print(f"\nturns end at {num_stops} of 262 tokens, load {os.getloadavg()[0]:.1f}")
        print(json.dumps({"alone": alone, **found}))
        print("\n".join(lines))
    # The others have one batch under way at a time, or queue in workers.
    assert ratios["tool_lag 2, coroutines"] <= MAX_STEP
