"""Ranks that share a sequence compute what one rank computes, each from its slice of the tokens."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_multiprocess

from lightrft.models import Actor, Critic
from lightrft.models.support import SamplingSupport
from lightrft.models.ulysses import check_head_counts
from lightrft.strategy.weight_sync.canary import actor_canary, score_with_actor

LENGTHS = (19, 5, 33, 1, 12)  # 70 tokens: filled up to 72 for 4 ranks


def make_batch():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(LENGTHS)[:, None]
    width = int(lengths.max())
    token_ids = torch.randint(0, 256, (len(LENGTHS), width), generator=generator)
    attention_mask = torch.arange(width) < lengths
    scored_mask = attention_mask & (torch.arange(width) >= 1 + lengths // 3)
    return (
        token_ids,
        attention_mask,
        scored_mask,
        torch.randn(*token_ids.shape, generator=generator),
    )


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
    support = SamplingSupport(top_k=30, top_p=0.7)
    output = actor(
        token_ids, attention_mask, scored_mask=scored_mask, entropy="grad", support=support
    )
    ((output.logprobs - 0.3 * output.entropy) * upstream).sum().backward()
    assert (output.log_kept_mass[scored_mask] < 0).all()
    return output.sampling_logprobs.detach(), gradients_of(actor, group)


def run_critic(directory, *, group=None):
    critic = Critic.from_pretrained(directory).double()
    torch.manual_seed(3)
    torch.nn.init.normal_(critic.value_head.weight)
    if group is not None:
        critic.share_sequences(group)
    token_ids, attention_mask, _, upstream = make_batch()
    values = critic(token_ids, attention_mask)
    (values * upstream).square().sum().backward()
    return values.detach(), gradients_of(critic, group)


def gradients_of(model, group):
    """The gradient of one loss is the sum over the ranks that share it."""
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    if group is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=group)
    return gradients


def relative_norm(found, expected):
    difference = sum(float((found[n] - expected[n]).double().square().sum()) for n in expected)
    return (difference / sum(float(v.double().square().sum()) for v in expected.values())) ** 0.5


def check_different_batches(directory, group, rank):
    actor = Actor.from_pretrained(directory)
    actor.share_sequences(group)
    token_ids, attention_mask, scored_mask, _ = make_batch()
    token_ids[0, 3] += rank
    with pytest.raises(ValueError, match="must pass the same batch"):
        actor(token_ids, attention_mask, scored_mask=scored_mask)
    with pytest.raises(ValueError, match="must pass the same batch"):
        actor(token_ids[: 2 + rank], attention_mask[: 2 + rank])
    canary = actor_canary(
        actor, actor, dtypes=[torch.float32], max_length=None, device=torch.device("cpu")
    )
    sequence = [7, 9 + rank, 11, 13]  # what the engines of two ranks answer may differ
    alone = score_with_actor(Actor.from_pretrained(directory), sequence, device=torch.device("cpu"))
    assert canary.score(sequence) == pytest.approx(alone, abs=1e-5)
    empty = torch.zeros_like(scored_mask)
    assert not actor(make_batch()[0], attention_mask, scored_mask=empty).logprobs.any()


def mean_loss_norm(strategy, directory):
    """Gradient norm of the other way to accumulate: mean losses of micro-batches of one row."""
    ready, _, _, _ = strategy.prepare_models_and_optimizers(
        Actor.from_pretrained(directory), None, None, None, None, 10
    )
    token_ids, attention_mask, scored_mask, _ = make_batch()
    for row in range(strategy.data_rank, 4, strategy.num_data_ranks):
        row = [row if row < 3 else 4]  # row 3 has nothing to score
        output = ready.model(token_ids[row], attention_mask[row], scored_mask=scored_mask[row])
        loss = output.logprobs.sum() / scored_mask[row].sum()
        strategy.backward(loss, *ready[:2])
        result = strategy.optimizer_step(ready.optimizer, ready.model, None)
    return result.grad_norm


def check_strategies(directory):
    """Two data-parallel groups of two ranks; each micro-batch belongs to a group."""
    from lightrft.strategy import get_fake_strategy, get_strategy

    args = {"train_batch_size": 4, "micro_train_batch_size": 1, "bf16": False, "max_norm": 0.0}
    expected = mean_loss_norm(get_fake_strategy(args), directory)
    for options in ({"fsdp": True}, {"zero_stage": 2}):
        strategy = get_strategy({**args, **options, "sp_size": 2})
        assert (strategy.num_data_ranks, strategy.accumulated_gradient) == (2, 2)
        assert mean_loss_norm(strategy, directory) == pytest.approx(expected, rel=1e-5)
        with pytest.raises(ValueError, match=r"sp_size 2 needs a model that divides.*Linear"):
            strategy.prepare_model(torch.nn.Linear(2, 2), is_training=True)
        assert strategy.reduce_over_data(1, "sum") == 2
        assert strategy.all_reduce(1, "sum") == 4
    with pytest.raises(ValueError, match=r"sp_size: got world_size 4 and sp_size 3"):
        get_strategy({**args, "fsdp": True, "sp_size": 3})


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
                planted = {n: g / size for n, g in gradients.items()}
                assert relative_norm(planted, expected_gradients) > 0.4
        expected, expected_gradients = run_critic(directory)
        values, gradients = run_critic(directory, group=dist.group.WORLD)
        found.append(float((values - expected).abs().max() / expected.abs().max()))
        found.append(relative_norm(gradients, expected_gradients))
    check_different_batches(directories[0], pairs[rank // 2], rank % 2)
    check_strategies(directories[1])
    dist.destroy_process_group()
    return found


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.deepspeed
def test_shared_sequences_give_the_results_of_whole_ones(checkpoints):
    args = (list(checkpoints.values()),)
    # Models in float64: the rounding of float32 products depends on shapes and processors, and
    # comes to as much as 2e-6 here. The critic's head stays in float32.
    for found in run_multiprocess(compare, 4, args=args, timeout_seconds=280):
        assert max(found[0::2]) <= 1e-6, found
        assert max(found[1::2]) <= 1e-7, found


def test_heads_that_cannot_be_dealt_are_named():
    check_head_counts(6, 3)
    with pytest.raises(ValueError, match=r"sp_size 4 and 6 heads; legal values: \[1, 2, 3, 6\]"):
        check_head_counts(6, 4)
