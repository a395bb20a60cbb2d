"""Recorded experts over two ranks: shared sequences, and sharded weights, equal one rank."""

import pytest
import torch
import torch.distributed as dist
from tests.models.batches import relative_norm
from tests.models.moe_types import moe_model
from tests.ranks import run_multiprocess
from torch.distributed.tensor import DTensor

from lightrft.models import Actor
from lightrft.models.types import Replayed

NAMES = ("qwen3_moe", "deepseek_v3")
LENGTHS = (12, 5, 9, 10)


def batch_of(name):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 100, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    width = 2 * {"qwen3_moe": 3, "deepseek_v3": 2}[name]
    first = torch.randint(8, (*ids.shape, width // 2), generator=generator)
    routes = torch.stack([first, (first + 1) % 8], dim=-1).flatten(-2).to(torch.uint8)
    return ids, mask, mask & (torch.arange(max(LENGTHS)) > 1), routes


def run(model, batch, rows=slice(None)):
    ids, mask, scored, routes = (each[rows] for each in batch)
    output = model(ids, mask, scored_mask=scored, recorded=Replayed(routes=routes))
    (output.logprobs * torch.linspace(-1, 1, ids.shape[1])).sum().backward()
    return output.logprobs.detach()


def gradients(model):
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).flatten()
    return found


def compare(rank, world_size):
    from lightrft.strategy import get_strategy

    strategy = get_strategy({"train_batch_size": 4, "micro_train_batch_size": 1, "fsdp": True})
    strategy.setup_distributed()
    results = []
    for name in NAMES:
        batch, alone = batch_of(name), Actor(moe_model(name)).train()
        expected = run(alone, batch)
        whole = gradients(alone)
        shared = Actor(moe_model(name)).train()
        shared.gradient_checkpointing_enable()
        shared.share_sequences(dist.group.WORLD)
        results.append(float((run(shared, batch) - expected).abs().max()))
        parts = gradients(shared)
        for part in parts.values():
            dist.all_reduce(part)
        results.append(relative_norm(parts, whole))
        sharded = Actor(moe_model(name)).train()
        sharded.gradient_checkpointing_enable()
        sharded = strategy.prepare_model(sharded, is_training=True)
        rows = slice(2 * rank, 2 * rank + 2)
        results.append(float((run(sharded, batch, rows) - expected[rows]).abs().max()))
        # FSDP2 averages over the ranks.
        averaged = {name: world_size * each for name, each in gradients(sharded).items()}
        results.append(relative_norm(averaged, whole))
    strategy.close()
    return results


@pytest.mark.full
def test_two_ranks_give_the_gradients_of_one():
    for found in run_multiprocess(compare, 2, timeout_seconds=240):
        assert max(found) < 1e-4, found
