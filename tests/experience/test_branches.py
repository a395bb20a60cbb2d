"""Episodes of several rows: optimizer batches, advantages and denominators count episodes."""

import numpy as np
import pytest
import torch

from lightrft.algorithms.aggregation import aggregate, local_normalizer
from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion
from lightrft.experience.minibatches import plan_minibatches
from lightrft.records.rollout import Rollout, ScoredRollout
from lightrft.records.table import (
    BRANCH_STEP,
    MAX_BRANCHES,
    branch_id,
    episode_places,
    episodes_of,
    row_shares,
    row_table,
)


def table_of(rng, num_episodes=8, most=4):
    """Rows of episodes with 1 to `most` branches, in the order of their ids."""
    scored = []
    for episode in range(num_episodes):
        for branch in range(int(rng.integers(1, most + 1))):
            size = int(rng.integers(1, 9))
            completion = Completion(1, 0, (1, 2), (3,) * size, (0.0,) * size, "temperature", "stop")
            sample_id = branch_id(episode, branch)
            row = Rollout(Prompt(0, "", ()), completion, episode // 2, sample_id, "")
            scored.append(ScoredRollout(row, float(episode) / 3))
    return row_table(sorted(scored, key=lambda item: item.rollout.sample_id))


@pytest.mark.parametrize("seed", range(5))
def test_episodes_are_counted_once_with_all_their_tokens(seed):
    table = table_of(np.random.default_rng(seed))
    found, places = episodes_of(table), episode_places(table)
    assert found.sample_ids.tolist() == list(range(8))
    for row, sample_id in enumerate(table.sample_ids.tolist()):
        assert found.sample_ids[places[row]] == sample_id % BRANCH_STEP
    for episode in range(8):
        own = table.sample_ids % BRANCH_STEP == episode
        assert found.sampled_lengths[episode] == table.sampled_lengths[own].sum()
        assert found.rewards[episode] == episode / 3
    assert table.sampled_lengths[0] == len([3] * int(table.response_lengths[0]))


def test_without_branches_nothing_changes():
    table = table_of(np.random.default_rng(0), most=1)
    assert episodes_of(table) is table
    assert row_shares(table) is None
    assert episode_places(table).tolist() == list(range(8))


def test_ids_have_bounds():
    assert branch_id(5, MAX_BRANCHES - 1) < 2**31
    for wrong in ((5, MAX_BRANCHES), (BRANCH_STEP, 0)):
        with pytest.raises(ValueError, match="at most 128 branches"):
            branch_id(*wrong)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("most_branches", [1, 4])
@pytest.mark.parametrize("budget_tokens", [None, 12])
def test_episodes_stay_whole_and_ranks_take_equally_many_passes(
    world_size, seed, most_branches, budget_tokens
):
    table = table_of(np.random.default_rng(seed), most=most_branches)
    places = episode_places(table)
    episodes = places if most_branches > 1 else None

    def plan(ranks):
        return plan_minibatches(
            table.lengths,
            train_batch_size=4,
            world_size=ranks,
            seed=1,
            step=seed,
            episodes=episodes,
        )

    found, alone = plan(world_size), plan(1)
    rows = [row for rank in range(world_size) for row in found.row_index(rank)]
    assert sorted(rows) == list(range(len(table)))
    for index in range(2):
        dealt = sorted(row for hand in found.rows[index] for row in hand)
        assert dealt == sorted(alone.rows[index][0])
        assert len({int(places[row]) for row in dealt}) == 4
        sizes = [len(hand) for hand in found.rows[index]]
        assert max(sizes) - min(sizes) <= 1
    config = TrainConfig(bf16=False, micro_rollout_batch_size=2, micro_batch_tokens=budget_tokens)
    for index in range(2):
        cuts = [
            found.micro_slices(
                table.lengths, index=index, rank=rank, micro_batch_size=1, config=config
            )
            for rank in range(world_size)
        ]
        assert len({len(cut) for cut in cuts}) == 1
        for rank, cut in enumerate(cuts):
            covered = [row for part in cut for row in range(part.start, part.stop)]
            rows = found.rows[index][rank]
            assert covered == list(range(len(rows)))
            # The rank with the fewest rows limits the number of passes, and so may break the bound.
            has_equal_ranks = len({len(hand) for hand in found.rows[index]}) == 1
            for part in cut if budget_tokens and has_equal_ranks else ():
                longest = max(table.lengths[row] for row in rows[part])
                assert len(rows[part]) == 1 or len(rows[part]) * longest <= budget_tokens
    passes = [
        found.forward_slices(table.lengths, rank=rank, config=config) for rank in range(world_size)
    ]
    assert len({len(each) for each in passes}) == 1
    for rank, each in enumerate(passes):
        covered = [row for part in each for row in range(part.start, part.stop)]
        assert covered == list(range(len(found.row_index(rank))))
        first, second = (found.places(index, rank) for index in range(2))
        assert (first.stop, second.stop) == (second.start, len(covered))


def slow_loss(losses, table, mode, budget):
    """Every episode is one sequence: float64, token by token."""
    total, num_tokens, sequences = 0.0, 0, 0
    for episode in range(8):
        own = [
            loss
            for row, loss in enumerate(losses)
            if table.sample_ids[row] % BRANCH_STEP == episode
        ]
        tokens = [value for loss in own for value in loss]
        num_tokens, sequences = num_tokens + len(tokens), sequences + 1
        total += sum(tokens) / (len(tokens) if mode == "seq-mean-token-mean" else 1)
    if mode == "token-mean":
        return total / num_tokens
    return total / (sequences * (budget if mode.endswith("norm") else 1))


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
@pytest.mark.parametrize("seed", range(3))
def test_an_episode_is_one_sequence(mode, seed):
    rng = np.random.default_rng(seed)
    table = table_of(rng)
    losses = [rng.normal(size=n) for n in table.response_lengths]
    width = int(table.response_lengths.max())
    mask = torch.zeros(len(table), width, dtype=torch.bool)
    padded = torch.full((len(table), width), torch.nan, dtype=torch.float64)
    for row, loss in enumerate(losses):
        mask[row, : len(loss)] = True
        padded[row, : len(loss)] = torch.from_numpy(loss)
    shares = torch.from_numpy(row_shares(table))
    parts = [slice(0, 3), slice(3, len(table))]
    z = sum(
        local_normalizer(mask[p], mode, max_response_tokens=50, row_shares=shares[p]) for p in parts
    )
    found = sum(aggregate(padded[p], mask[p], mode, z, row_shares=shares[p]) for p in parts)
    assert float(found) == pytest.approx(slow_loss(losses, table, mode, 50), rel=1e-9)
    if mode == "seq-mean-token-mean":  # the control: rows as sequences are something else
        other = aggregate(padded, mask, mode, local_normalizer(mask, mode))
        assert float(other) != pytest.approx(float(found), rel=1e-3)
