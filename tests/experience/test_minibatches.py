import numpy as np
import pytest

from lightrft.experience.minibatches import epoch_order, plan_minibatches


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
