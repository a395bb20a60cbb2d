"""Runs that are killed by SIGKILL at random moments end as the run that nobody killed, bit for bit.

Two ranks, an actor and a critic, a checkpoint after every step, written in the background. Ranks
are forked from a process that has imported everything, so that most of a run is training. After each
kill the same options are started again; compared are every file of the last checkpoint of both
models (weights, optimizer, schedule, generators, state of the trainer), the exported model, metrics
and samples.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from lightrft.strategy.testing import find_free_port, run_multiprocess

NUM_STEPS = 4
RUN_SECONDS = 150
BACKENDS = {"fsdp": {"fsdp": True}, "zero2": {"zero_stage": 2}, "zero3": {"zero_stage": 3}}
REWARD = """
def score(responses):
    return [float(sum(map(ord, text)) % 3) for text in responses]
"""


def settings(folder, backend, name):
    return {
        "pretrain": str(folder / "model"), "critic_pretrain": str(folder / "model"),
        "prompt_data": str(folder / "train.jsonl"), "reward_fn": (f"{folder / 'reward.py'}:score",),
        "advantage_estimator": "gae", "bf16": False, "engine_type": "hf", "async_save": True,
        "rollout_batch_size": 2, "n_samples_per_prompt": 2, "train_batch_size": 4,
        "micro_train_batch_size": 2, "generate_max_len": 4, "prompt_max_len": 32,
        "init_kl_coef": 0.0, "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3,
        "lr_warmup_ratio": 0.0, "num_episodes": 2, "max_steps": NUM_STEPS, "save_steps": 1,
        "timeout_minutes": 2.0, "parity_check_steps": -1,
        "output_dir": str(folder / f"{backend}_{name}"), **BACKENDS[backend],
    }  # fmt: skip


def write_inputs(folder):
    from lightrft.models.presets import write_tiny_model

    write_tiny_model(folder / "model", "tiny-qwen3", seed=1)
    rows = [json.dumps({"input": f"say {'aeiou'[i % 5] * (1 + i % 3)}"}) for i in range(NUM_STEPS)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "reward.py").write_text(REWARD)


class Ranks:
    """Two forked ranks of one run."""

    def __init__(self, options):
        folder = Path(options["output_dir"])
        self.log = folder.with_name(f"{folder.name}.log")
        port = find_free_port()
        self.codes = {self._fork(rank, port, options): None for rank in range(2)}

    def _fork(self, rank, port, options):
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            with self.log.open("a") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
            os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            from lightrft.config import TrainConfig
            from lightrft.trainer.runs.assembly import run_training

            run_training(TrainConfig(**options))
            self.log.with_suffix(".modules").write_text("\n".join(sys.modules))
            code = 0
        except BaseException as error:  # noqa: BLE001 - the parent reads the log
            print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)

    def running(self):
        for child, code in self.codes.items():
            if code is None:
                found, status = os.waitpid(child, os.WNOHANG)
                self.codes[child] = os.waitstatus_to_exitcode(status) if found else None
        return [child for child, code in self.codes.items() if code is None]

    def wait(self, seconds):
        """Exit codes by rank; None for one that did not end in time."""
        limit = time.monotonic() + seconds
        while self.running() and time.monotonic() < limit:
            time.sleep(0.01)
        return list(self.codes.values())

    def kill(self, children):
        for child in children:
            os.kill(child, signal.SIGKILL)
        # A survivor loses its connection and ends; it may also wait until its deadline.
        self.wait(2.0)
        for child in self.running():
            os.kill(child, signal.SIGKILL)
        self.wait(30.0)


def finish(options):
    """Runs to the end; how long that took."""
    begin = time.monotonic()
    ranks = Ranks(options)
    codes = ranks.wait(RUN_SECONDS)
    ranks.kill(ranks.running())
    assert codes == [0, 0], ranks.log.read_text()[-5000:]
    return time.monotonic() - begin


def kill_once(options, seconds, dice):
    """Starts and kills at a random moment; whether it was still running, and what was killed."""
    ranks = Ranks(options)
    moment = dice.uniform(0, seconds)
    ranks.wait(moment)
    running = ranks.running()
    if len(running) < 2:
        ranks.kill(running)
        return None
    chosen = dice.choice([running, running[:1], running[1:]])
    ranks.kill(chosen)
    return f"{moment:.3f} s, {len(chosen)} killed"


def timeless(path):
    ignored = ("second", "memory/", "weights_version", "tokens_per", "tflops", "mfu")
    return [
        {n: v for n, v in json.loads(line).items() if not any(word in n for word in ignored)}
        for line in path.read_text().splitlines()
    ]


def result(options):
    """All that a run has come to, in comparable form."""
    folder = Path(options["output_dir"])
    found = {"model": (folder / "model" / "model.safetensors").read_bytes()}
    for model in ("_actor", "_critic"):
        manifest = folder / "checkpoints" / model / f"global_step{NUM_STEPS}" / "manifest.json"
        for entry in json.loads(manifest.read_text())["files"]:
            found[model, entry["path"]] = entry["sha256"]
    for name in ("metrics.jsonl", "samples.jsonl"):
        found[name] = timeless(folder / name)
    return found


def run_backend(backend, folder, *, num_kills, chain, dice):
    """Kills and compares; how each run was killed.

    Args:
        num_kills: In all.
        chain: Kills of one run before it is let to its end.
    """
    whole = settings(folder, backend, "whole")
    finish(whole)
    import_modules(Path(f"{whole['output_dir']}.modules"))
    shutil.rmtree(whole["output_dir"])
    # With all modules imported it is as fast as those that are killed.
    seconds = finish(whole)
    expected, kills = result(whole), []
    assert len(expected["metrics.jsonl"]) == NUM_STEPS
    assert len({json.dumps(row) for row in expected["metrics.jsonl"]}) == NUM_STEPS
    while len(kills) < num_kills:
        options = settings(folder, backend, "killed")
        shutil.rmtree(options["output_dir"], ignore_errors=True)
        done = []
        while len(done) < min(chain, num_kills - len(kills)):
            found = kill_once(options, seconds, dice)
            if found is None:  # it had ended: another try from the beginning
                shutil.rmtree(options["output_dir"])
                done = []
                continue
            done.append(found)
        finish(options)
        ended = result(options)
        differing = [name for name in expected if ended.get(name) != expected[name]]
        assert differing == [], (backend, done)
        assert ended.keys() == expected.keys()
        kills += done
        print(f"{backend}: {len(kills)} of {num_kills} kills, last {done}", flush=True)
    return kills


def import_modules(file):
    for name in file.read_text().split("\n"):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def run_all(rank, world_size, folder, num_kills, chain, seed):
    """The kills of every backend; run as a process without threads, so that it may fork."""
    import torch

    torch.set_num_threads(1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    folder, dice = Path(folder), random.Random(seed)
    write_inputs(folder)
    return {
        backend: run_backend(backend, folder, num_kills=number, chain=chain, dice=dice)
        for backend, number in num_kills.items()
    }


@pytest.mark.multiprocess
@pytest.mark.deepspeed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("num_kills", "chain"),
    [
        pytest.param({"fsdp": 2, "zero2": 2, "zero3": 2}, 2, id="6"),
        pytest.param({"fsdp": 34, "zero2": 33, "zero3": 33}, 1, id="100", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_as_the_run_that_nobody_killed(tmp_path, num_kills, chain):
    seed = random.randrange(2**32)
    (kills,) = run_multiprocess(
        run_all, 1, timeout_seconds=3500, args=(str(tmp_path), num_kills, chain, seed)
    )
    assert {backend: len(found) for backend, found in kills.items()} == num_kills, seed
