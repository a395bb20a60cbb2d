"""A rank that stops in the middle of an update: the others end in time and say where, and who."""

import os
import signal
from datetime import timedelta

import pytest
import torch
from tests.ranks import RankFailure, run_multiprocess

from lightrft.config import TrainConfig
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.policy.updates import PolicyUpdate, TrainedModel
from lightrft.strategy import get_strategy

pytestmark = pytest.mark.shard("training")

DEADLINE_SECONDS = 6.0


def update(rank, world_size, settings):
    """One optimizer step of two micro-batches; the last rank is stopped between them."""
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=300))
    strategy = get_strategy(
        {
            "train_batch_size": 4,
            "micro_train_batch_size": 1,
            "bf16": False,
            "timeout_minutes": 5.0,
            **settings,
        }
    )
    model = strategy.prepare_model(torch.nn.Linear(4, 2), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    ready = strategy.prepare((model, optimizer, None))
    trained = TrainedModel("actor", ready.model, ready.optimizer, None)

    def share():
        return ready.model(torch.ones(1, 4)).square().mean()

    def stopped():
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return share()

    config = TrainConfig(timeout_minutes=DEADLINE_SECONDS / 60)
    step = PolicyUpdate(config, None, strategy.training, StepMetrics())
    strategy.barrier()
    step.optimize(trained, [share, stopped], torch.ones(()))


@pytest.mark.full
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "settings",
    [{"zero_stage": 2}, pytest.param({"fsdp": True}, marks=pytest.mark.slow)],
    ids=["zero2", "fsdp"],
)
def test_a_stopped_rank_in_the_update_is_named_with_the_phase(capfd, settings):
    with pytest.raises(RankFailure, match="died with exit code 7"):
        run_multiprocess(update, 2, timeout_seconds=120, args=(settings,))
    text = capfd.readouterr().err
    assert f"deadline: rank 0 spent more than {DEADLINE_SECONDS:g} s in phase 'train'" in text
    assert "  rank 1: train (since " in text
    assert "rank(s) [1] ran into no deadline: stopped, or stuck elsewhere" in text
