"""Ranks that share a sequence compute what one rank computes, each from its slice of the tokens."""

import pytest
import torch
import torch.distributed as dist
from tests.engines.syncs import canary_of
from tests.models.batches import LENGTHS, make_batch, relative_norm
from tests.ranks import run_multiprocess

from lightrft.models import Actor
from lightrft.models.support import KeptSets, SamplingSupport
from lightrft.models.types import Replayed
from lightrft.models.ulysses import check_head_counts
from lightrft.strategy.weight_sync.canary import score_with_actor


def run_actor(directory, *, is_fused, group=None, widths=None):
    actor = Actor.from_pretrained(directory, fused_linear_logprob=is_fused, chunk_size=100)
    actor.double().train()
    actor.gradient_checkpointing_enable()
    if group is not None:
        actor.share_sequences(group)
    if widths is not None:
        block = actor.model.model.layers[1]
        block.register_forward_pre_hook(lambda _, args: widths.append(tuple(args[0].shape[:2])))
    token_ids, attention_mask, scored_mask, upstream = make_batch()
    # Every second token has a record: itself and 16 other ids.
    recorded = [[t, *((t + 1 + i) % 200 for i in range(16))] for t in token_ids.flatten().tolist()]
    starts = 17 * torch.arange(token_ids.numel()).view_as(token_ids)
    is_recorded = scored_mask & (torch.arange(token_ids.shape[1]) % 2 == 0)
    kept = KeptSets(torch.tensor(recorded).flatten(), starts, 17 * is_recorded, is_complete=False)
    support = SamplingSupport(top_k=30, top_p=0.7, renormalises=True, kept=kept)
    output = actor(
        token_ids,
        attention_mask,
        scored_mask=scored_mask,
        entropy="grad",
        recorded=Replayed(support),
    )
    ((output.logprobs - 0.3 * output.entropy) * upstream).sum().backward()
    assert (output.log_kept_mass[scored_mask & ~is_recorded] < 0).all()
    assert not output.log_kept_mass[is_recorded].any()
    return output.sampling_logprobs.detach(), gradients_of(actor, group)


def gradients_of(model, group):
    """The gradient of one loss is the sum over the ranks that share it."""
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    if group is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=group)
    return gradients


def check_different_batches(directory, group, rank):
    actor = Actor.from_pretrained(directory)
    actor.share_sequences(group)
    token_ids, attention_mask, scored_mask, _ = make_batch()
    token_ids[0, 3] += rank
    with pytest.raises(ValueError, match="must pass the same batch"):
        actor(token_ids, attention_mask, scored_mask=scored_mask)
    with pytest.raises(ValueError, match="must pass the same batch"):
        actor(token_ids[: 2 + rank], attention_mask[: 2 + rank])
    canary = canary_of(actor)
    sequence = [7, 9 + rank, 11, 13]  # what the engines of two ranks answer may differ
    alone = score_with_actor(Actor.from_pretrained(directory), sequence, device=torch.device("cpu"))
    assert canary.score(sequence) == pytest.approx(alone, abs=1e-5)
    empty = torch.zeros_like(scored_mask)
    assert not actor(make_batch()[0], attention_mask, scored_mask=empty).logprobs.any()


def check_refusals():
    from lightrft.strategy import get_strategy

    args = {"train_batch_size": 4, "micro_train_batch_size": 1, "fsdp": True}
    with pytest.raises(ValueError, match=r"sp_size 2 needs a model that divides.*Linear"):
        get_strategy({**args, "sp_size": 2}).prepare_model(torch.nn.Linear(2, 2), is_training=True)
    with pytest.raises(ValueError, match=r"sp_size: got world_size 4 and sp_size 3"):
        get_strategy({**args, "sp_size": 3})


def compare(rank, world_size, directories):
    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = []
    for directory, modes in zip(directories, ((False, True), (True,)), strict=True):
        for is_fused in modes:
            expected, expected_gradients = run_actor(directory, is_fused=is_fused)
            # Two key heads: one for each of two ranks, copied for four.
            for group in (pairs[rank // 2], dist.group.WORLD):
                widths = []
                logprobs, gradients = run_actor(
                    directory, is_fused=is_fused, group=group, widths=widths
                )
                size = dist.get_world_size(group)
                # Twice: the block is computed again in the backward pass.
                assert widths == [(1, -(-sum(LENGTHS) // size))] * 2, widths
                found.append(float((logprobs - expected).abs().max()))
                found.append(relative_norm(gradients, expected_gradients))
    check_different_batches(directories[0], pairs[rank // 2], rank % 2)
    check_refusals()
    dist.destroy_process_group()
    return found


@pytest.mark.full
@pytest.mark.deepspeed
def test_shared_sequences_give_the_results_of_whole_ones(checkpoints):
    args = (list(checkpoints.values()),)
    # Models in float64: the rounding of float32 products depends on shapes and processors, and
    # comes to as much as 2e-6 here.
    for found in run_multiprocess(compare, 4, args=args, timeout_seconds=280):
        assert max(found[0::2]) <= 1e-6, found
        assert max(found[1::2]) <= 1e-7, found


def test_heads_that_cannot_be_dealt_are_named():
    check_head_counts(6, 3)
    with pytest.raises(ValueError, match=r"sp_size 4 and 6 heads; legal values: \[1, 2, 3, 6\]"):
        check_head_counts(6, 4)
