"""FSDP2 gathers the head's weight by its own hooks: sharded and whole actors agree."""

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_multiprocess
from torch.distributed.fsdp import fully_shard

from lightrft.models import Actor
from lightrft.models.support import SamplingSupport


def batch_of(rank, has_idle_rank):
    generator = torch.Generator().manual_seed(rank)
    token_ids = torch.randint(0, 256, (2, 8), generator=generator)
    attention_mask = torch.arange(8) < torch.tensor([[8], [5]])
    scored_mask = attention_mask & (torch.arange(8) > 2)
    if has_idle_rank and rank == 1:
        scored_mask = torch.zeros_like(scored_mask)  # a rank with nothing to score must not hang
    upstream = torch.randn(2, 8, generator=generator)
    return token_ids, attention_mask, scored_mask, upstream


def loss_of(actor, rank, has_idle_rank):
    token_ids, attention_mask, scored_mask, upstream = batch_of(rank, has_idle_rank)
    output = actor(token_ids, attention_mask, scored_mask=scored_mask, entropy="grad")
    return ((output.logprobs + 0.3 * output.entropy) * upstream).sum()


def mass_of(actor, rank, has_idle_rank):
    token_ids, attention_mask, scored_mask, _ = batch_of(rank, has_idle_rank)
    support = SamplingSupport(top_k=30, top_p=0.7)
    with torch.no_grad():
        output = actor(token_ids, attention_mask, scored_mask=scored_mask, support=support)
    return output.log_kept_mass


def shard_and_compare(rank, world, directories):
    dist.init_process_group("gloo")
    differences = []
    for directory in directories:
        for is_fused in (False, True):
            whole = Actor.from_pretrained(directory, fused_linear_logprob=is_fused, chunk_size=100)
            for other in range(world):
                (loss_of(whole, other, is_fused) / world).backward()
            sharded = Actor.from_pretrained(directory, fused_linear_logprob=is_fused)
            for layer in sharded.model.model.layers:
                fully_shard(layer)
            fully_shard(sharded)
            loss_of(sharded, rank, is_fused).backward()
            total, norm = torch.zeros(()), torch.zeros(())
            want = dict(whole.named_parameters())
            for name, parameter in sharded.named_parameters():
                gradient = parameter.grad.full_tensor()
                total += (gradient - want[name].grad).square().sum()
                norm += want[name].grad.square().sum()
            differences.append(float((total / norm).sqrt()))
            masses = [mass_of(actor, rank, is_fused) for actor in (sharded, whole)]
            assert bool(masses[1].any()) != (is_fused and rank == 1)
            torch.testing.assert_close(*masses, rtol=0, atol=1e-5)
    dist.destroy_process_group()
    return differences


@pytest.mark.full
@pytest.mark.multiprocess
def test_fsdp2_gradients_equal_the_whole_model(checkpoints):
    args = (list(checkpoints.values()),)
    for differences in run_multiprocess(shard_and_compare, 2, args=args, timeout_seconds=240):
        assert len(differences) == 4
        assert max(differences) < 1e-6
