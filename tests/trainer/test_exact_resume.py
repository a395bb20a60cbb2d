"""A run that is interrupted anywhere and continued is the uninterrupted run, bit for bit."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
from tests.ranks import run_multiprocess

pytestmark = pytest.mark.shard("training")

REWARD = """
def score(responses):
    return [float(sum(map(ord, text)) % 3) for text in responses]
"""
NUM_STEPS = 4
BACKENDS = {
    "fsdp": {"fsdp": True, "async_save": True},
    "zero2": {"zero_stage": 2, "async_save": True},
    "zero3": {"zero_stage": 3},
}


class Interrupted(Exception):
    """Stands for whatever ends a run in the middle."""


def settings(folder, model, backend, name):
    return {
        "pretrain": model,
        "prompt_data": str(folder / "train.jsonl"),
        "input_key": "prompt",
        "reward_fn": (f"{folder / 'reward.py'}:score",),
        "bf16": backend == "zero2",
        "engine_type": "hf",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "train_batch_size": 4,
        "micro_train_batch_size": 1,
        "generate_max_len": 5,
        "prompt_max_len": 32,
        "init_kl_coef": 0.05,
        "kl_target": 0.01,
        "num_episodes": 2,
        "reward_running_norm": True,
        "actor_learning_rate": 1e-3,
        "max_steps": NUM_STEPS,
        "save_steps": 2,
        "save_rollouts": True,
        "enable_ema": True,
        "ema_beta": 0.75,
        "output_dir": str(folder / f"{backend}_{name}"),
        **BACKENDS[backend],
    }


def interrupt(step):
    """Makes the trainer stop in the middle of a step, on every rank."""
    from lightrft.run.loop import Loop

    original = Loop.update

    def update(self, batch, under_way):
        if under_way.number == step:
            raise Interrupted
        return original(self, batch, under_way)

    Loop.update = update
    return lambda: setattr(Loop, "update", original)


def train_cells(rank, world_size, cells, folder, model):
    """{backend: (rank's draws of the whole run, of the parts)}; the runs leave files."""
    import torch
    import torch.distributed as dist

    from lightrft.config import TrainConfig
    from lightrft.run.assembly import run_training

    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    found = {}
    for backend, stop in cells:
        asdict(run_training(TrainConfig(**settings(folder, model, backend, "whole"))))
        draws = [torch.rand(4).tolist()]
        parts = settings(folder, model, backend, "parts")
        restore = interrupt(stop)
        with contextlib.suppress(Interrupted):
            run_training(TrainConfig(**parts))
        restore()
        summary = run_training(TrainConfig(**parts, load_checkpoint=True))
        draws.append(torch.rand(4).tolist())
        found[backend] = (draws, summary.num_resumed_steps)
    return found


def timeless(path):
    ignored = ("second", "memory/", "tokens_per")
    return [
        {n: v for n, v in json.loads(line).items() if not any(word in n for word in ignored)}
        for line in path.read_text().splitlines()
    ]


@pytest.fixture
def folder(tmp_path):
    rows = [
        json.dumps({"prompt": f"say {'aeiou'[i % 5] * (1 + i % 3)} {i}"})
        for i in range(2 * NUM_STEPS)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def check(folder, model, world_size, backends):
    # Another step every time; it stands in the message of a failure.
    stops = {backend: random.randint(2, NUM_STEPS) for backend in backends}
    ranks = run_multiprocess(
        train_cells,
        world_size,
        timeout_seconds=400,
        args=(list(stops.items()), Path(folder), model),
    )
    for backend, stop in stops.items():
        where = f"{backend} on {world_size} ranks, interrupted in step {stop}"
        whole, parts = (folder / f"{backend}_{name}" for name in ("whole", "parts"))
        # Losses, learning rates, KL weight, rewards, lengths, gradient norms; prompts and samples.
        for name in ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl"):
            assert timeless(whole / name) == timeless(parts / name), (where, name)
        metrics = timeless(whole / "metrics.jsonl")
        assert len(metrics) == NUM_STEPS
        assert len({m["policy_loss"] for m in metrics}) == NUM_STEPS
        for weights in ("model", "model_ema"):
            file = f"{weights}/model.safetensors"
            assert (whole / file).read_bytes() == (parts / file).read_bytes(), (where, weights)
        assert (whole / "model/model.safetensors").read_bytes() != (
            whole / "model_ema/model.safetensors"
        ).read_bytes()
        for results in ranks:
            draws, num_resumed = results[backend]
            assert num_resumed == (stop - 1) // 2 * 2, where
            # The generators of every rank are where the uninterrupted run left them.
            assert draws[0] == draws[1], where


slow = pytest.mark.slow


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.multiprocess
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("world_size", "backends"),
    [
        (2, ("fsdp", "zero3")),
        pytest.param(2, ("zero2",), marks=slow),
        pytest.param(1, tuple(BACKENDS), marks=slow),
    ],
)
def test_an_interrupted_run_continues_to_the_last_bit(folder, tiny_model, world_size, backends):
    check(folder, tiny_model, world_size, backends)
