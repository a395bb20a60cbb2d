"""Token rewards, returns and generalised advantage estimation."""

import numpy as np
import pytest
import torch

from lightrft.algorithms import TokenAdvantageInputs
from lightrft.algorithms.advantages.token_level import (
    discounted_returns,
    gae_advantages,
    generalized_advantages,
    token_rewards,
    turn_discounts,
)

VALUES = torch.tensor([[0.5, 0.4, 0.3, 0.2]]).double()
REWARDS = torch.tensor([[0.0, 0.0, 0.0, 1.0]]).double()
ALL = torch.ones(1, 4, dtype=torch.bool)


@pytest.mark.parametrize("gamma, lambd", [(1.0, 1.0), (0.9, 0.8), (0.0, 0.5), (1.0, 0.0)])
def test_gae_and_returns_equal_a_loop_over_the_sampled_tokens(gamma, lambd, ragged):
    batch = ragged(2)
    mask, noisy = batch.tensors.mask, batch.tensors.values
    noisy[~mask] = float("nan")  # the padding must not leak in
    rewards = batch.tensors.rewards
    result = generalized_advantages(rewards, noisy, mask, gamma=gamma, lambd=lambd)
    returns = discounted_returns(rewards, mask, gamma=gamma)
    for i in range(len(batch.mask)):
        tokens = np.nonzero(batch.mask[i])[0]
        advantage = following = value = 0.0
        for t in reversed(tokens):
            delta = batch.rewards[i, t] + gamma * value - batch.values[i, t]
            advantage = delta + gamma * lambd * advantage
            following = batch.rewards[i, t] + gamma * following
            value = batch.values[i, t]
            assert result.advantages[i, t].item() == pytest.approx(advantage, abs=1e-12)
            assert result.returns[i, t].item() == pytest.approx(advantage + value, abs=1e-12)
            assert returns[i, t].item() == pytest.approx(following, abs=1e-12)
    for tensor in (result.advantages, result.returns, returns):
        assert (tensor[~mask] == 0).all()


@pytest.mark.parametrize("alpha, lambd", [(None, 0.3), (0.4, None), (0.05, None), (10.0, None)])
def test_the_policy_may_have_a_lambda_of_its_own(alpha, lambd, ragged):
    batch = ragged(4)
    mask, values, rewards = (
        torch.tensor(each) for each in (batch.mask, batch.values, batch.rewards)
    )
    inputs = TokenAdvantageInputs(rewards, mask, values, 0.9, 0.8)
    found = gae_advantages(inputs, policy_lambd=lambd, length_alpha=alpha)
    both = generalized_advantages(rewards, values, mask, gamma=0.9, lambd=0.8)
    assert torch.equal(found.returns, both.returns)
    for i in range(len(mask)):
        tokens, advantage, value = np.nonzero(batch.mask[i])[0], 0.0, 0.0
        own = lambd if alpha is None else max(0.0, 1 - 1 / (alpha * max(len(tokens), 1)))
        for t in reversed(tokens):
            delta = batch.rewards[i, t] + 0.9 * value - batch.values[i, t]
            advantage, value = delta + 0.9 * own * advantage, batch.values[i, t]
            assert found.advantages[i, t].item() == pytest.approx(advantage, abs=1e-12)
    assert (found.advantages[~mask] == 0).all()


def test_two_lambdas_of_the_policy_are_an_error():
    inputs = TokenAdvantageInputs(REWARDS, ALL, VALUES)
    for given in ({"length_alpha": 0.05, "policy_lambd": 0.9}, {"length_alpha": 0.0}):
        with pytest.raises(ValueError, match="must be > 0 and leaves no place"):
            gae_advantages(inputs, **given)


@pytest.mark.parametrize("gamma, lambd", [(0.9, 0.8), (0.5, 1.0), (0.0, 0.5)])
def test_a_discount_over_turns_equals_a_loop_over_turns(gamma, lambd):
    draw = torch.Generator().manual_seed(5)
    mask = torch.rand(6, 17, generator=draw) < 0.6
    mask[0], mask[1] = False, True
    rewards, values = (torch.randn(6, 17, generator=draw).double() for _ in range(2))
    discounts = turn_discounts(mask, gamma=gamma)
    returns = discounted_returns(rewards, mask, gamma=discounts)
    result = generalized_advantages(rewards, values, mask, gamma=discounts, lambd=lambd)
    for i in range(6):
        turns = []
        for t in range(17):
            if mask[i, t]:
                is_new = t == 0 or not mask[i, t - 1]
                turns = [*turns, [t]] if is_new else [*turns[:-1], [*turns[-1], t]]
        following = advantage = value = 0.0
        for turn in reversed(turns):
            for t in reversed(turn):
                step = gamma if t == turn[-1] else 1.0
                following = float(rewards[i, t]) + step * following
                delta = float(rewards[i, t]) + step * value - float(values[i, t])
                advantage, value = delta + step * lambd * advantage, float(values[i, t])
                assert returns[i, t].item() == pytest.approx(following, abs=1e-12)
                assert result.advantages[i, t].item() == pytest.approx(advantage, abs=1e-12)
    # A row of one turn is not discounted at all.
    assert torch.equal(returns[1], discounted_returns(rewards, mask)[1])


def test_rows_without_any_column_are_empty_results():
    empty, mask = torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.bool)
    assert discounted_returns(empty, mask).shape == (3, 0)
    result = generalized_advantages(empty, empty, mask, gamma=1.0, lambd=0.95)
    assert result.advantages.shape == result.returns.shape == (3, 0)


def test_discounts_outside_the_unit_interval_are_errors():
    with pytest.raises(ValueError, match="gamma must lie in"):
        discounted_returns(REWARDS, ALL, gamma=1.5)
    with pytest.raises(ValueError, match="lambd must lie in"):
        generalized_advantages(REWARDS, VALUES, ALL, gamma=0.9, lambd=-0.1)


def test_the_reward_lands_on_the_last_sampled_token_and_kl_on_every_one(worked):
    kl = worked.old - worked.ref
    shaped = token_rewards(torch.tensor([1.0, 0.0]).double(), worked.mask, kl=kl, kl_coef=0.1)
    expected = [0.01, -0.03, 0.1, 0.96, -0.02, 0.07]
    assert shaped[worked.mask].tolist() == pytest.approx(expected, abs=1e-9)
    assert shaped[~worked.mask].tolist() == [0.0, 0.0]
    for gamma, numbers in (
        (1.0, [1.04, 1.03, 1.06, 0.96, 0.05, 0.07]),
        (0.9, [0.76384, 0.8376, 0.964, 0.96, 0.043, 0.07]),
    ):
        returns = discounted_returns(shaped, worked.mask, gamma=gamma)
        assert returns[worked.mask].tolist() == pytest.approx(numbers, abs=1e-9)


def test_the_reward_skips_masked_tokens_and_empty_rows():
    mask = torch.tensor([[True, False, True, False], [False] * 4, [False, True, False, False]])
    shaped = token_rewards(torch.tensor([1.0, 5.0, -2.0]), mask)
    assert shaped.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, -2, 0, 0]]


def test_what_turns_were_paid_stands_where_they_end_and_the_rest_on_the_last_token():
    mask = torch.tensor([[True, True, False, True, True], [True, False, True, False, False]])
    paid = torch.tensor([[0.0, 0.25, 0.0, 0.0, 0.5], [-1.0, 0.0, 0.0, 0.0, 0.0]])
    shaped = token_rewards(torch.tensor([1.0, 2.0]), mask, turn_rewards=paid)
    assert shaped.tolist() == [[0, 0.25, 0, 0, 0.75], [-1, 0, 3, 0, 0]]
    kl = torch.ones(2, 5)
    shaped = token_rewards(torch.tensor([1.0, 2.0]), mask, kl=kl, kl_coef=0.5, turn_rewards=paid)
    assert shaped.sum(-1).tolist() == [1 - 4 * 0.5, 2 - 2 * 0.5]
    # A turn is credited with what came after it alone.
    returns = discounted_returns(shaped, mask, gamma=1.0)
    whole = discounted_returns(
        token_rewards(torch.tensor([1.0, 2.0]), mask, kl=kl, kl_coef=0.5), mask, gamma=1.0
    )
    assert (whole - returns)[mask].tolist() == [0, 0, 0.25, 0.25, 0, -1]


def test_a_kl_weight_needs_a_kl_and_may_not_be_negative():
    with pytest.raises(ValueError, match="kl_coef must be >= 0"):
        token_rewards(torch.ones(1), ALL, kl_coef=0.1)
    with pytest.raises(ValueError, match="kl_coef must be >= 0"):
        token_rewards(torch.ones(1), ALL, kl=VALUES, kl_coef=-0.1)
