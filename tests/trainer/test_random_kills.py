"""A run that is killed by SIGKILL at a random moment ends as the run that nobody killed.

Moments are counted in events of the run, the lines of its log, and not in seconds: so they are
spread over the whole run on a machine of any speed.

Two ranks, an actor and a critic, a checkpoint after every step, written in the background. Ranks
are forked from a process that has imported everything, so that most of a run is training. After
each kill the same options are started again; compared are every file of the last checkpoint of both
models (weights, optimizer, schedule, generators, state of the trainer), the exported model, metrics
and samples.
"""

import contextlib
import importlib
import json
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
from tests import machine, runs
from tests.forked_run import Ranks
from tests.ranks import run_multiprocess
from tests.runs import FEW, compared, lines, rollout_options

pytestmark = pytest.mark.shard("kills")

NUM_STEPS = 4
RUN_SECONDS = 150
BACKENDS = {
    "fsdp": {},
    "zero2": {"fsdp": False, "zero_stage": 2, "enable_ema": True, "ema_beta": 0.75},
    "zero3": {
        "fsdp": False,
        "zero_stage": 3,
        "init_kl_coef": 0.05,
        "kl_target": 0.01,
        "reward_running_norm": True,
    },
    "adapters": {"lora_rank": 4, "lora_sync": "adapter"},
}
REWARD = """
def score(responses):
    return [float(sum(map(ord, text)) % 3) for text in responses]
"""


def settings(folder, backend, name):
    return rollout_options(
        folder,
        f"{backend}_{name}",
        critic_pretrain=str(folder / "model"),
        advantage_estimator="gae",
        async_save=True,
        generate_max_len=4,
        critic_learning_rate=1e-3,
        num_episodes=2,
        max_steps=NUM_STEPS,
        save_steps=1,
        timeout_minutes=2.0,
        parity_check_steps=-1,
        **FEW,
        **BACKENDS[backend],
    )


def write_inputs(folder, num_rows=NUM_STEPS):
    runs.write_inputs(runs.tiny_models(folder, "model"), runs.say_rows(num_rows), reward=REWARD)


def finish(options, world_size=2, prepare=None):
    """Runs to the end."""
    ranks = Ranks(options, world_size, prepare)
    codes = ranks.wait(RUN_SECONDS)
    ranks.kill(ranks.running())
    assert codes == [0] * world_size, ranks.log.read_text()[-5000:]


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def num_events(options):
    """Lines of the first rank's log: phases that ended, and what the run says."""
    return num_lines(Path(options["output_dir"]) / "logs/rank_0.log")


def kill_once(options, whole_events, dice):
    """Starts and kills at a random moment; what was killed, None if the run had ended."""
    folder = Path(options["output_dir"])
    left = 1 - num_lines(folder / "metrics.jsonl") / (NUM_STEPS + 1)
    # At least one event is left: a run may be killed between its last line and its summary.
    wanted = dice.randrange(max(1, int(left * whole_events)))
    before = num_events(options)
    ranks = Ranks(options)
    limit = time.monotonic() + machine.seconds(RUN_SECONDS)
    while ranks.running() and num_events(options) - before < wanted:
        assert time.monotonic() < limit, ranks.log.read_text()[-3000:]
        # A run that starts over begins another log.
        before = min(before, num_events(options))
        time.sleep(0.002)
    time.sleep(dice.uniform(0, 0.2))  # between two events, such as inside of episodes
    running = ranks.running()
    chosen = running if len(running) < 2 else dice.choice([running, running[:1], running[1:]])
    ranks.kill(chosen)
    # The last thing that a run writes: it had nothing left to do.
    has_ended = len(running) < 2 or (folder / "summary.json").exists()
    return None if has_ended else f"event {wanted}, {len(chosen)} killed"


def timeless(path):
    """What a run came to: not what a process has measured or moved."""
    return [
        {name: value for name, value in compared(each).items() if "bridge/" not in name}
        for each in lines(path)
    ]


def result(
    options,
    models=("_actor", "_critic"),
    num_steps=NUM_STEPS,
    logs=("metrics.jsonl", "samples.jsonl"),
):
    """All that a run has come to, in comparable form."""
    folder = Path(options["output_dir"])
    found = {path.parent.name: path.read_bytes() for path in folder.glob("model*/*.safetensors")}
    assert "model" in found
    for model in models:
        manifest = folder / "checkpoints" / model / f"global_step{num_steps}" / "manifest.json"
        for entry in json.loads(manifest.read_text())["files"]:
            found[model, entry["path"]] = entry["sha256"]
    for name in logs:
        found[name] = timeless(folder / name)
    return found


def whole_run(backend, folder):
    """What the run that nobody kills comes to, and of how many events it consists."""
    options = settings(folder, backend, "whole")
    finish(options)
    import_modules(Path(f"{options['output_dir']}.modules"))
    expected = result(options)
    assert len(expected["metrics.jsonl"]) == NUM_STEPS
    assert len({json.dumps(row) for row in expected["metrics.jsonl"]}) == NUM_STEPS
    return expected, num_events(options)


def killed_run(backend, folder, expected, *, whole_events, num_kills, dice):
    """Kills one run again and again, lets it go on to its end, and compares."""
    options, done = settings(folder, backend, "killed"), []
    shutil.rmtree(options["output_dir"], ignore_errors=True)
    while len(done) < num_kills:
        found = kill_once(options, whole_events, dice)
        if found is None:  # it had ended: another try from the beginning
            shutil.rmtree(options["output_dir"])
        done = [] if found is None else [*done, found]
    finish(options)
    require_same_end(result(options), expected, (backend, done))
    return done


def require_same_end(ended, expected, told):
    assert ended.keys() == expected.keys(), told
    differing = [name for name in expected if ended[name] != expected[name]]
    assert differing == [], (told, [_first_difference(ended[n], expected[n]) for n in differing])


def _first_difference(ended, expected):
    """Both sides where two logs part; of anything else only that they do."""
    if not isinstance(ended, list) or len(ended) != len(expected):
        return "another size or content"
    found = next((a, b) for a, b in zip(ended, expected, strict=True) if a != b)
    return [
        {k: v for k, v in side.items() if found[1 - i].get(k) != v} for i, side in enumerate(found)
    ]


def import_modules(file):
    for name in file.read_text().split("\n"):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def become_launcher():
    """Makes a rank a process without threads, so that it may fork ranks of its own."""
    import torch
    import tqdm

    torch.set_num_threads(1)
    # The lock of bars is shared by all processes that are forked: one that is killed while it has
    # it would stop the next. The thread that watches bars may have it while a rank is forked.
    tqdm.tqdm.set_lock(threading.RLock())
    tqdm.tqdm.monitor_interval = 0
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def kill_in_a_process(run_all, folder, num_runs, chain):
    """Calls `run_all` in a process of its own, and expects all of its kills."""
    seed = random.randrange(2**32)
    done = run_multiprocess(
        run_all, 1, timeout_seconds=3500, args=(str(folder), num_runs, chain, seed)
    )
    assert done == [num_runs * chain], seed


def run_all(rank, world_size, folder, num_runs, chain, seed):
    """Kills every run `chain` times."""
    become_launcher()
    folder, dice, num_kills = Path(folder), random.Random(seed), 0
    write_inputs(folder)
    whole = {name: whole_run(name, folder) for name in BACKENDS}
    for number in range(num_runs):
        backend = list(BACKENDS)[number % len(BACKENDS)]
        expected, events = whole[backend]
        how = {"whole_events": events, "num_kills": chain, "dice": dice}
        done = killed_run(backend, folder, expected, **how)
        num_kills += len(done)
        print(f"{num_kills} kills, last {backend} after {done}", flush=True)
    return num_kills


@pytest.mark.full
@pytest.mark.deepspeed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "num_runs, chain",
    [(4, 2), pytest.param(100, 1, marks=pytest.mark.slow)],
    ids=["8 kills", "100 kills"],
)
def test_a_killed_run_ends_as_the_run_that_nobody_killed(tmp_path, num_runs, chain):
    kill_in_a_process(run_all, tmp_path, num_runs, chain)
