from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.update_inputs import sample_table

from lightrft.algorithms.interface import advantage_estimator
from lightrft.algorithms.moments import Moments
from lightrft.config import TrainConfig
from lightrft.config.registry import ADVANTAGE_ESTIMATORS
from lightrft.experience.maker import AdvantageSettings, assemble, shape_rewards
from lightrft.records.batch import PolicyOutputs, collate


class Alone:
    """All collectives of one rank."""

    def reduce_over_data(self, data, op):
        assert op == "sum"
        return data


class Peer:
    """Adds what another rank would have sent, one message after another."""

    def __init__(self, *messages):
        self.messages = list(messages)

    def reduce_over_data(self, data, op):
        assert op == "sum"
        return data + self.messages.pop(0)


def make_table(lengths, rewards, *, group_size=4, masked=()):
    numbers = np.arange(len(lengths))
    return sample_table(
        lengths,
        group_ids=numbers // group_size,
        token_ids=np.arange(2 * len(lengths) + sum(lengths)),
        rewards=rewards,
        is_masked=np.isin(numbers, masked),
    )


@advantage_estimator(is_token_level=True, needs_critic=True)
def unwhitened_gae(inputs):
    return ADVANTAGE_ESTIMATORS.load("gae")(inputs)


def settings(name, *, kl_coef=0.0, **options):
    return AdvantageSettings(TrainConfig(**options), ADVANTAGE_ESTIMATORS.load(name), kl_coef)


def run(table, rows, how, *, strategy=None, ref=None, old=None, values=None):
    index = np.array(rows)
    batch = collate(table.take(index), temperature=1.0, device=torch.device("cpu"))
    shape = batch.token_ids.shape
    zeros = torch.zeros(shape)
    outputs = PolicyOutputs(
        zeros if old is None else old(shape),
        None if ref is None else ref(shape),
        None if values is None else values(shape),
        None,
    )
    result = assemble(
        table,
        torch.from_numpy(index),
        batch,
        outputs,
        shape_rewards(table, None, TrainConfig()),
        settings=how,
        context=strategy or Alone(),
    )
    return result, batch.response_mask


def per_row(result, mask):
    return [result.advantages[i][mask[i]].tolist() for i in range(len(mask))]


def test_group_advantages_use_rows_of_other_ranks():
    table = make_table([3, 1, 2, 4], [1.0, 0.0, 0.5, 1.0])
    result, mask = run(table, [3, 1], settings("group_norm"))
    expected = [0.783348, -1.30558]  # formulas: (R - mean) / (std + 1e-6)
    for row, value in zip(per_row(result, mask), expected, strict=True):
        np.testing.assert_allclose(row, value, rtol=1e-5)


def test_kl_in_the_reward_is_a_return_to_go():
    table = make_table([3, 3, 3, 3], [1.0, 0.0, 0.5, 1.0])
    how = settings("dr_grpo", kl_coef=0.1, kl_estimator="k1")
    old = torch.linspace(-1, 1, 20).reshape(4, 5)
    result, mask = run(
        table, [0, 1, 2, 3], how, old=lambda shape: old, ref=lambda shape: torch.zeros(shape)
    )
    for row, centred in enumerate([0.375, -0.625, -0.125, 0.375]):
        penalty = 0.1 * old[row, 2:].double()
        expected = [centred - float(penalty[t:].sum()) for t in range(3)]
        np.testing.assert_allclose(result.advantages[row][mask[row]], expected, atol=1e-6)


def test_whitening_uses_the_tokens_of_all_ranks_once():
    table = make_table([3, 1, 2, 4], [1.0, -0.5, 0.25, 3.0], group_size=1)
    how = settings("reinforce++")
    tokens = np.repeat(table.rewards, table.response_lengths)
    mean, std = tokens.mean(), tokens.std()
    other = np.repeat(table.rewards[2:], table.response_lengths[2:])
    sums = torch.tensor([len(other), other.sum()], dtype=torch.float64)
    peer = Peer(sums, torch.tensor(((other - mean) ** 2).sum()))
    result, mask = run(table, [0, 1], how, strategy=peer)
    for row, reward in zip(per_row(result, mask), table.rewards[:2], strict=True):
        np.testing.assert_allclose(row, (reward - mean) / std, rtol=1e-5)
    alone, _ = run(table, [0, 1], how)
    assert not torch.allclose(alone.advantages, result.advantages)


def test_a_group_estimator_is_not_whitened_again():
    table = make_table([3, 1, 2, 4], [1.0, 0.0, 0.5, 1.0])
    plain, mask = run(table, [0, 1, 2, 3], settings("group_norm"))
    whitened, _ = run(table, [0, 1, 2, 3], settings("group_norm", advantages_norm=True))
    assert float(plain.advantages[mask].double().mean()) == pytest.approx(0.36556, abs=1e-5)
    assert float(whitened.advantages[mask].double().mean()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "turn_credit, expected", [("last", [0.81, 0.9, 1.0]), ("discounted", [0.9, 0.9, 1.0])]
)
def test_tokens_or_turns_are_discounted_and_observations_take_no_time(turn_credit, expected):
    table = make_table([4], [1.0], group_size=1)
    table = replace(table, is_sampled=np.array([True, True, False, True]))
    how = settings("gae", gamma=0.9, lambd=1.0, turn_credit=turn_credit)
    how = replace(how, estimator=unwhitened_gae)
    values = torch.tensor([[0, 0, 0.5, 0.4, 0.3, 0.2]])
    result, mask = run(table, [0], how, values=lambda _: values)
    np.testing.assert_allclose(result.returns[mask], expected, atol=1e-6)
    np.testing.assert_allclose(result.advantages[mask], expected - values[mask].numpy(), atol=1e-6)


def test_an_excluded_row_has_no_advantage_and_no_vote():
    table = make_table([2, 2, 2, 2], [1.0, 0.0, 0.5, 100.0], masked=[3])
    result, mask = run(table, [0, 1, 2, 3], settings("dr_grpo"))
    assert not mask[3].any()
    assert result.advantages[3].abs().sum() == 0
    np.testing.assert_allclose(
        [row[0] for row in per_row(result, mask)[:3]], [0.5, -0.5, 0.0], atol=1e-6
    )


def test_advantages_are_clipped_and_must_be_finite():
    table = make_table([2, 2, 2, 2], [1.0, 0.0, 0.5, 9.0])
    result, _ = run(table, [0, 1, 2, 3], settings("dr_grpo", advantage_clip=0.5))
    assert result.advantages.abs().max() == 0.5
    how = settings("dr_grpo", kl_coef=0.1, kl_estimator="k1")
    with pytest.raises(RuntimeError, match=r"samples \[2"):
        run(
            table,
            [2, 1],
            how,
            old=lambda shape: torch.full(shape, -1.0).index_fill(0, torch.tensor([0]), torch.nan),
            ref=lambda shape: torch.zeros(shape),
        )


def test_rewards_are_normalised_by_all_rewards_so_far_then_clipped():
    rng = np.random.default_rng(0)
    moments = Moments()
    config = TrainConfig(
        reward_running_norm=True, reward_running_norm_minus_mean=True, reward_clip=1.0
    )
    seen = []
    for _ in range(3):
        rewards = rng.normal(3, 2, 8)
        seen = [*seen, *rewards]
        shaped = shape_rewards(make_table([1] * 8, rewards), moments, config)
        expected = (rewards - np.mean(seen)) / np.std(seen, ddof=1)
        np.testing.assert_allclose(shaped.rewards, expected.clip(-1, 1), rtol=1e-9)
        assert shaped.is_clipped.tolist() == (abs(expected) > 1).tolist()
        moments = shaped.moments


@pytest.mark.parametrize("minus_mean", [False, True])
def test_greedy_rewards_are_shaped_like_those_they_are_compared_with(minus_mean):
    rewards, before = np.array([10.0, 12.0, 10.0, 8.0]), np.array([7.0, 9.0, 14.0])
    config = TrainConfig(
        reward_running_norm=True, reward_running_norm_minus_mean=minus_mean, reward_clip=1.2
    )
    moments = shape_rewards(make_table([1] * 3, before), Moments(), config).moments
    greedy = torch.tensor([10.0, 10.0, 30.0, 30.0], dtype=torch.float64)
    shaped = shape_rewards(make_table([1] * 4, rewards), moments, config, greedy_rewards=greedy)
    # Only completions that are trained on feed the moments.
    seen = np.concatenate([before, rewards])
    shift = seen.mean() if minus_mean else 0.0
    for found, raw in ((shaped.rewards, rewards), (shaped.greedy_rewards, greedy.numpy())):
        expected = ((raw - shift) / seen.std(ddof=1)).clip(-1.2, 1.2)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
