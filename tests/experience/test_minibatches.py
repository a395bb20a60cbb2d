from types import SimpleNamespace

import numpy as np
import pytest

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.media.text_encoder import TEXT_ENCODER
from lightrft.engines.types import ROUTES, Completion
from lightrft.experience.delivery import deliver, with_shares
from lightrft.experience.minibatches import epoch_order, plan_minibatches
from lightrft.records.rollout import Rollout, ScoredRollout
from lightrft.records.table import row_table
from lightrft.rollout.source import Samples
from lightrft.strategy import get_fake_strategy


def plan(lengths, world_size, *, train_batch_size=8, seed=0, step=0):
    return plan_minibatches(
        lengths, train_batch_size=train_batch_size, world_size=world_size, seed=seed, step=step
    )


def test_tokens_are_balanced_better_than_by_dealing_in_order():
    rng = np.random.default_rng(2)
    spreads = {"snake": 0.0, "in order": 0.0}
    for trial in range(20):
        lengths = rng.exponential(100, 64).astype(int) + 1
        dealt = plan(lengths, 4, train_batch_size=64, step=trial)
        loads = [sum(lengths[list(hand)]) for hand in dealt.rows[0]]
        naive = [sum(lengths[rank::4]) for rank in range(4)]
        spreads["snake"] += max(loads) - min(loads)
        spreads["in order"] += max(naive) - min(naive)
    assert spreads["snake"] < 0.5 * spreads["in order"]


def in_groups(lengths, groups, prompts, world_size, size):
    kept = plan_minibatches(
        lengths, train_batch_size=size, world_size=world_size, seed=0, step=0, groups=groups
    )
    return with_shares(kept, lengths, groups, prompts[groups])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_groups_stay_together_in_the_same_batches_with_even_loads(world_size):
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(16), 8)
    prompts, responses = rng.integers(20, 400, 16), rng.integers(1, 200, 128)
    lengths = prompts[groups] + responses
    for size in (128, 64):
        plain = plan(lengths, world_size, train_batch_size=size)
        kept = in_groups(lengths, groups, prompts, world_size, size)
        for before, after in zip(plain.rows, kept.rows, strict=True):
            assert sorted(sum(before, ())) == sorted(sum(after, ()))
            assert {len(share) for share in after} == {size // world_size}
            runs = [sum(np.diff(groups[list(share)]) != 0) + 1 for share in after]
            present = len(np.unique(groups[list(sum(after, ()))]))
            assert sum(runs) <= present + world_size - 1
            loads = [sum(lengths[list(share)]) for share in after]
            assert max(loads) <= 1.5 * min(loads)


def test_a_budget_of_tokens_counts_an_eighth_of_a_repeated_prompt():
    groups = np.repeat(np.arange(4), 8)
    # The layout shares no prompt below 16 tokens, or below an eighth of a row.
    for few, size in ((15, 40), (16, 129)):
        assert not any(in_groups(np.full(32, size), groups, np.full(4, few), 2, 32).shared)
    lengths = np.full(32, 100 + 20)
    kept = in_groups(lengths, groups, np.full(4, 100), 2, 32)
    options = {"packing_samples": True, "micro_batch_tokens": 120 + 7 * (20 + 13)}
    for how, num_slices in (("auto", 2), ("off", 8)):
        config = TrainConfig(**options, shared_prefix=how)
        for rank in range(2):
            cuts = kept.micro_slices(lengths, index=0, rank=rank, micro_batch_size=1, config=config)
            assert len(cuts) == num_slices
            rows = kept.rows[0][rank]
            assert how == "off" or {len(set(groups[list(rows[cut])])) for cut in cuts} == {1}


def test_prompts_count_once_where_rows_begin_alike_for_certain():
    """Calls of an agent have prompts of their own; experts of a prompt may differ by sample."""
    scored = []
    for row in range(8):
        prompt, facts = (row // 2 % 2,) * 20, {ROUTES: ("00" * 20,)} if row < 4 else {}
        completion = Completion(row, 0, prompt, (3,), (0.0,), "temperature", "stop", facts=facts)
        scored.append(ScoredRollout(Rollout(Prompt(0, "", ()), completion, row // 4, row, ""), 0.0))
    ranks = get_fake_strategy(SimpleNamespace(seed=0)).context
    config = TrainConfig(train_batch_size=8, shared_prefix="auto")
    samples = Samples(scored, row_table(scored), 2)
    kept, *_ = deliver(samples, config, 0, ranks, TEXT_ENCODER, num_training=1)
    assert kept.shared == (0,) * 5 + (20, 0, 20)


def test_seed_and_step_change_the_permutation_and_nothing_else_does():
    lengths = [5] * 32
    first = plan(lengths, 2)
    assert first == plan(lengths, 2)
    assert first != plan(lengths, 2, step=1)
    assert first != plan(lengths, 2, seed=1)


@pytest.mark.parametrize("rows, size, world", [(12, 8, 1), (0, 8, 1), (8, 8, 3)])
def test_sizes_that_do_not_divide_are_named(rows, size, world):
    with pytest.raises(ValueError, match=f"got {rows} samples, train_batch_size={size}, {world}"):
        plan([1] * rows, world, train_batch_size=size)


def test_later_epochs_visit_all_batches_in_another_order():
    orders = {epoch_order(8, seed=0, step=3, epoch=epoch) for epoch in range(4)}
    assert len(orders) == 4
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert epoch_order(8, seed=0, step=3, epoch=0) == tuple(range(8))
