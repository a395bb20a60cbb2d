"""A run that is interrupted anywhere and continued is the uninterrupted run, bit for bit."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.ranks import run_multiprocess
from tests.runs import compared, interrupted, lines, rollout_options, say_rows, train, write_inputs

from lightrft.strategy.distributed.process_groups import start_process_group

pytestmark = pytest.mark.shard("training")

NUM_STEPS = 4
BACKENDS = {
    "fsdp": {"async_save": True},
    "zero2": {"fsdp": False, "zero_stage": 2, "async_save": True, "bf16": True},
    "zero3": {"fsdp": False, "zero_stage": 3},
}
REWARD = """
def score(responses):
    return [float(sum(map(ord, text)) % 3) for text in responses]
"""


def options_of(folder, backend, name):
    return rollout_options(
        folder,
        f"{backend}_{name}",
        n_samples_per_prompt=2,
        train_batch_size=4,
        micro_train_batch_size=1,
        generate_max_len=5,
        init_kl_coef=0.05,
        kl_target=0.01,
        num_episodes=2,
        reward_running_norm=True,
        lr_warmup_ratio=0.03,
        max_steps=NUM_STEPS,
        save_steps=2,
        save_rollouts=True,
        enable_ema=True,
        ema_beta=0.75,
        **BACKENDS[backend],
    )


def train_cells(rank, world_size, stops, folder):
    """{backend: (rank's draws after the whole run and its parts, steps that were resumed)}."""
    start_process_group(None)
    found = {}
    for backend, stop in stops.items():
        train(options_of(folder, backend, "whole"))
        draws = [torch.rand(4).tolist()]
        parts = options_of(folder, backend, "parts")
        interrupted(lambda _, run=parts: SimpleNamespace(train=partial(train, run)), None, stop)
        summary = train(parts | {"load_checkpoint": True})
        draws.append(torch.rand(4).tolist())
        found[backend] = (draws, summary.num_resumed_steps)
    return found


def weights(folder, name):
    return (folder / name / "model.safetensors").read_bytes()


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "world_size, backends",
    [
        (2, ("fsdp", "zero3")),
        pytest.param(2, ("zero2",), marks=pytest.mark.slow),
        pytest.param(1, tuple(BACKENDS), marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_continues_to_the_last_bit(tmp_path, tiny_model, world_size, backends):
    (tmp_path / "model").symlink_to(tiny_model)
    write_inputs(tmp_path, say_rows(2 * NUM_STEPS), reward=REWARD)
    # Another step every time; it stands in the message of a failure.
    stops = {backend: random.randint(2, NUM_STEPS) for backend in backends}
    ranks = run_multiprocess(train_cells, world_size, timeout_seconds=400, args=(stops, tmp_path))
    for backend, stop in stops.items():
        where = f"{backend} on {world_size} ranks, interrupted in step {stop}"
        whole, parts = (tmp_path / f"{backend}_{name}" for name in ("whole", "parts"))
        # Losses, learning rates, KL weight, rewards, lengths, gradient norms; prompts and samples.
        for name in ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl"):
            found, expected = (list(map(compared, lines(run / name))) for run in (parts, whole))
            assert found == expected, (where, name)
        metrics = lines(whole / "metrics.jsonl")
        assert len(metrics) == len({step["policy_loss"] for step in metrics}) == NUM_STEPS
        for name in ("model", "model_ema"):
            assert weights(whole, name) == weights(parts, name), (where, name)
        assert weights(whole, "model") != weights(whole, "model_ema")
        for results in ranks:
            draws, num_resumed = results[backend]
            assert num_resumed == (stop - 1) // 2 * 2, where
            # The generators of every rank are where the uninterrupted run left them.
            assert draws[0] == draws[1], where
