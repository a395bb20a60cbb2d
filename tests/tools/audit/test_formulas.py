"""What the audit's formulas decide in cases that steps of correct runs do not have."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from lightrft.algorithms import reward_losses
from lightrft.algorithms.interface import preference_loss_traits
from lightrft.config import TrainConfig
from lightrft.config.registry import PREFERENCE_LOSSES, REWARD_LOSSES
from lightrft.tools.audit import advantages as adv, reward_updates
from lightrft.tools.audit.optimizers import learning_rate
from lightrft.tools.audit.pairs import Borders, Pair, differentiated
from lightrft.tools.audit.preference_losses import Answers, Pairs, preference_loss_named
from lightrft.tools.audit.record import OptimizerFacts

SCORES = adv.Scores(
    np.array([1.0, 0.0, 0.5, 1.0, 1, 1, 1, 1]),
    np.full(8, 0.5),
    np.repeat([0, 1], 4),
    np.array([4, 2, 6, 3, 2, 2, 3, 3]),
    np.ones(8, dtype=bool),
)


def test_rewards_that_differ_by_rounding_alone_are_equal():
    scores = dataclasses.replace(SCORES, rewards=np.full_like(SCORES.rewards, 0.3))
    scores.rewards[0] = 0.1 + 0.2
    for name in ("group_norm", "rloo", "gpg", "maxrl"):
        assert not adv.row_advantages(name, scores, {}).any()


def test_a_schedule_that_was_changed_runs_its_gap_out():
    config = TrainConfig(lr_warmup_ratio=0.2, min_lr_ratio=0.1)
    facts = OptimizerFacts("AdamW", [], 0, 10, schedule_changed_at=4, schedule_gap=-0.3)
    found = [learning_rate(1.0, s, 10, facts, config) for s in (4, 5, 6)]
    assert found == pytest.approx([0.868198 - 0.2, 0.722208 - 0.1, 0.55], abs=1e-6)


def test_a_decision_within_rounding_of_a_bound_is_the_run_s():
    borders = Borders(1e-3)
    own, run = torch.tensor([1.0001, 1.0001, 1.5]), torch.tensor([0.9999, 1.0002, 0.9])
    assert borders.above(Pair(own, run), 1.0).tolist() == [False, True, True]
    assert borders.num_taken == 1


def by_scores(total, at):
    """Return the sum of values of a formula, and its derivatives, at these scores."""
    scores = torch.as_tensor(at, dtype=torch.float64)
    found = differentiated(lambda p, _: total(p.exact), Pair(scores, scores), Borders(0.0))
    return float(found.value.sum()), found.slope.numpy()


def test_equal_margins_keep_the_order_of_the_run():
    """Two margins that rounding alone tells apart, with references that are far apart."""
    loss = preference_loss_named("aot")
    chosen, rejected, chosen_reference, rejected_reference, ones = (
        torch.tensor(each, dtype=torch.float64)
        for each in ((-5.0, -5.0), (-6.0, -6.0 - 1e-7), (-5.0, -2.0), (-4.0, -9.0), (1, 1))
    )

    def slopes(seen):
        seen = torch.tensor(seen, dtype=torch.float64)
        worse = Answers(rejected, rejected_reference, ones, rejected, rejected_reference)

        def total(sums):
            better = Answers(sums, chosen_reference, ones, seen, chosen_reference)
            return loss.function(Pairs(better, worse, 1.0, 0.0, 1e-3), loss.defaults)

        return by_scores(total, chosen)[1]

    forward, backward = slopes((-5.0, -5.0)), slopes((-5.0, -5.0 - 1e-6))
    assert abs(forward[0] - backward[1]) < 1e-6
    assert abs(forward[0] - forward[1]) > 1e-3


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_every_preference_loss_of_the_stage_is_audited(name):
    loss, traits = preference_loss_named(name), preference_loss_traits(PREFERENCE_LOSSES.load(name))
    assert (loss.of_answers, loss.has_reference) == (traits.is_of_answers, traits.uses_reference)


@pytest.mark.parametrize("name", REWARD_LOSSES)
def test_a_reward_loss_and_its_derivatives_are_those_of_the_stage(name):
    function = REWARD_LOSSES.load(name)
    own = reward_updates.REWARD_LOSSES[reward_updates.OTHER_NAMES.get(name, name)]
    random = np.random.default_rng(3)
    values, other = random.normal(size=9) * 3, random.random(9) < 0.4
    if function in (reward_losses.squared_error, reward_losses.binary_cross_entropy):
        other = random.random(9)
    other = torch.tensor(other)
    leaf = torch.tensor(values, requires_grad=True)
    total = function(leaf, other).sum()
    total.backward()
    value, slopes = by_scores(lambda scores: own.function(scores, other, own.defaults), values)
    assert value == pytest.approx(total.item(), rel=1e-9)
    np.testing.assert_allclose(slopes, leaf.grad.numpy(), rtol=1e-8)
