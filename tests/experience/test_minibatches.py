import numpy as np
import pytest

from lightrft.config import TrainConfig
from lightrft.experience.minibatches import epoch_order, plan_minibatches


def plan(lengths, world_size, *, train_batch_size=8, seed=0, step=0):
    return plan_minibatches(
        lengths, train_batch_size=train_batch_size, world_size=world_size, seed=seed, step=step
    )


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_optimizer_batches_hold_the_same_samples_for_any_number_of_ranks(world_size):
    lengths = np.random.default_rng(0).integers(1, 100, 32)
    alone = plan(lengths, 1)
    shared = plan(lengths, world_size)
    for batch in range(4):
        dealt = sorted(row for hand in shared.rows[batch] for row in hand)
        assert dealt == sorted(alone.rows[batch][0])


def test_every_sample_is_trained_exactly_once():
    lengths = np.random.default_rng(1).integers(1, 100, 48)
    dealt = plan(lengths, 4)
    assert sorted(row for rank in range(4) for row in dealt.row_index(rank)) == list(range(48))
    assert all(len(hand) == 2 for batch in dealt.rows for hand in batch)


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


@pytest.mark.parametrize(("rows", "size", "world"), [(12, 8, 1), (0, 8, 1), (8, 8, 3)])
def test_sizes_that_do_not_divide_are_named(rows, size, world):
    with pytest.raises(ValueError, match=f"got {rows} samples, train_batch_size={size}, {world}"):
        plan([1] * rows, world, train_batch_size=size)


def test_later_epochs_visit_all_batches_in_another_order():
    orders = {epoch_order(8, seed=0, step=3, epoch=epoch) for epoch in range(4)}
    assert len(orders) == 4
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert epoch_order(8, seed=0, step=3, epoch=0) == tuple(range(8))


def test_micro_batches_by_tokens_cover_every_share_in_equal_numbers():
    rng, config = np.random.default_rng(3), TrainConfig(micro_batch_tokens=150)
    for world_size in (1, 2, 4):
        lengths = rng.integers(1, 60, size=48)
        lengths[5] = 500  # longer than the budget
        plan = plan_minibatches(lengths, train_batch_size=16, world_size=world_size, seed=0, step=0)
        for index in range(plan.num_minibatches):
            counts = set()
            for rank in range(world_size):
                rows = plan.rows[index][rank]
                slices = plan.micro_slices(
                    lengths, index=index, rank=rank, micro_batch_size=4, config=config
                )
                assert [i for s in slices for i in range(s.start, s.stop)] == list(range(len(rows)))
                for part in slices:
                    size = part.stop - part.start
                    longest = max(lengths[row] for row in rows[part])
                    assert size >= 1
                    assert size == 1 or size * longest <= 150
                counts.add(len(slices))
            assert len(counts) == 1
