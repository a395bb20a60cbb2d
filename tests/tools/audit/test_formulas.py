"""What the audit's formulas decide in cases that steps of correct runs do not have."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.autograd.functional import jacobian

from lightrft.algorithms import reward_losses
from lightrft.algorithms.interface import preference_loss_traits
from lightrft.config import TrainConfig
from lightrft.config.registry import KL_ESTIMATORS, PREFERENCE_LOSSES, REWARD_LOSSES
from lightrft.tools.audit import advantages as adv, losses, preference_losses, row_updates
from lightrft.tools.audit.findings import Findings
from lightrft.tools.audit.optimizers import learning_rate
from lightrft.tools.audit.pairs import Draw, Pair
from lightrft.tools.audit.preference_losses import Answers, Pairs, aot
from lightrft.tools.audit.record import OptimizerFacts
from lightrft.tools.audit.tolerances import TOLERANCES

SCORES = adv.Scores(
    torch.tensor([1.0, 0.0, 0.5, 1.0, 1, 1, 1, 1]).double(),
    torch.full((8,), 0.5).double(),
    torch.arange(8) // 4,
    torch.tensor([4, 2, 6, 3, 2, 2, 3, 3]).double(),
    torch.ones(8, dtype=torch.bool),
)


def test_rewards_that_differ_by_rounding_alone_are_equal():
    scores = dataclasses.replace(SCORES, rewards=torch.full_like(SCORES.rewards, 0.3))
    scores.rewards[0] = 0.1 + 0.2
    for name in ("group_norm", "rloo", "gpg", "maxrl"):
        assert not adv.row_advantages(name, scores, {}).any()


def test_a_schedule_that_was_changed_runs_its_gap_out():
    config = TrainConfig(lr_warmup_ratio=0.2, min_lr_ratio=0.1)
    facts = OptimizerFacts("AdamW", [], 0, 10, schedule_changed_at=4, schedule_gap=-0.3)
    found = [learning_rate(1.0, s, 10, facts, config) for s in (4, 5, 6)]
    assert found == pytest.approx([0.868198 - 0.2, 0.722208 - 0.1, 0.55], abs=1e-6)


def test_a_decision_within_rounding_of_a_bound_is_the_run_s():
    draw = Draw(1e-3)
    own, run = torch.tensor([1.0001, 1.0001, 1.5]), torch.tensor([0.9999, 1.0002, 0.9])
    assert draw.above(Pair(own, run), 1.0).tolist() == [False, True, True]
    assert draw.num_taken == 1


def test_moved_values_choose_the_same_tokens_unless_the_run_computes_in_bfloat16():
    values, moved = (Pair(t, t) for t in (torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 2, 3])))
    for tolerance, places in ((1e-3, [2, 1]), (0.2, [0, 2])):
        exact = Draw(tolerance)
        assert exact.highest(values, 2).tolist() == [2, 1]
        assert exact.highest(values, 1).tolist() == [2]
        for draw in exact.others():  # each repeats both choices, in their order
            assert draw.highest(moved, 2).tolist() == places
            assert draw.highest(moved, 1).tolist() == places[:1]


@pytest.mark.parametrize("moved, verdict", [(0.5, "differs"), (1.0, "equal")])
def test_a_difference_by_which_rounding_moves_a_value_is_none(moved, verdict):
    findings = Findings(TOLERANCES["float32"])
    for value in (2.0, 2.0 + moved):
        findings.number("loss", 1.0, value)
        findings.is_settling = True
    findings.settle()
    assert findings.rows[0].verdict == verdict


def test_equal_margins_keep_the_order_of_the_run():
    """Two margins that rounding alone tells apart, with references that are far apart."""
    chosen, rejected, chosen_reference, rejected_reference, ones = (
        torch.tensor(each, dtype=torch.float64)
        for each in ((-5.0, -5.0), (-6.0, -6.0 - 1e-7), (-5.0, -2.0), (-4.0, -9.0), (1, 1))
    )

    def slopes(seen):
        seen = torch.tensor(seen, dtype=torch.float64)
        worse = Answers(*(Pair(each, each) for each in (rejected, rejected_reference)), ones)

        def total(sums):
            better = Answers(Pair(sums, seen), Pair(chosen_reference, chosen_reference), ones)
            return aot(Pairs(better, worse, 0.0, 1e-3))

        return jacobian(lambda sums: total(sums).sum(), chosen)

    forward, backward = slopes((-5.0, -5.0)), slopes((-5.0, -5.0 - 1e-6))
    assert abs(forward[0] - backward[1]) < 1e-6
    assert abs(forward[0] - forward[1]) > 1e-3


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_every_preference_loss_of_the_stage_is_audited(name):
    loss = (preference_losses.PREFERENCE_LOSSES | preference_losses.OTHER_NAMES)[name]
    has_reference = loss not in preference_losses.WITHOUT_REFERENCE
    assert has_reference == preference_loss_traits(PREFERENCE_LOSSES.load(name)).uses_reference


@pytest.mark.parametrize("name", REWARD_LOSSES)
def test_a_reward_loss_and_its_derivatives_are_those_of_the_stage(name):
    function, own = REWARD_LOSSES.load(name), row_updates.REWARD_LOSSES[name]
    random = np.random.default_rng(3)
    values, other = random.normal(size=9) * 3, random.random(9) < 0.4
    if function in (reward_losses.squared_error, reward_losses.binary_cross_entropy):
        other = random.random(9)
    values, other = torch.tensor(values), torch.tensor(other)
    totals = [lambda at, loss=loss: loss(at, other).sum() for loss in (own, function)]
    torch.testing.assert_close(*(total(values) for total in totals))
    torch.testing.assert_close(*(jacobian(total, values) for total in totals))


TOKENS = torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / 4
MASK = torch.arange(6) < torch.tensor([[6], [2], [4]])
# Losses of which a part has no derivative by its definition.
HELD_BACK = {"cispo", "cpgd", "gspo-token", "clip_cov", "kl_cov"}


def policy_loss(name):
    loss, _ = losses.POLICY_LOSSES[name]
    old, advantages, draw = TOKENS[1], TOKENS[2], Draw(0.0)

    def total(p):
        pair = Pair(p, p.detach())
        return loss(losses.Batch(pair, Pair(old, old), advantages, MASK, draw))

    return total


def kl(name):
    other = Pair(TOKENS[3], TOKENS[3])
    return lambda p: losses.kl_term(name, Pair(p, p.detach()), other, other, MASK, Draw(0.0))


def preference_loss(name):
    function = preference_losses.PREFERENCE_LOSSES[name]
    ones = torch.full((3,), 6.0, dtype=torch.float64)
    reference = TOKENS[1].sum(dim=1) - 9

    def total(p):
        sums = p.sum(dim=1) - 9
        better, worse = (
            Answers(Pair(each, each), Pair(reference, reference), ones)
            for each in (sums, sums.flip(0) - 1)
        )
        return function(Pairs(better, worse, 0.1, 1e-9))

    return total


FORMULAS = {
    **{name: policy_loss(name) for name in losses.POLICY_LOSSES if name not in HELD_BACK},
    **{name: kl(name) for name in KL_ESTIMATORS if not name.endswith(("+", "_is"))},
    **{name: preference_loss(name) for name in preference_losses.PREFERENCE_LOSSES},
    "value": lambda p: losses.value_term(
        *(Pair(each, each) for each in (p, TOKENS[1])),
        TOKENS[2],
        MASK,
        clip=0.1,
        draw=Draw(0.0),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_derivatives_are_those_of_finite_differences(name):
    torch.autograd.gradcheck(lambda p: FORMULAS[name](p).sum(), TOKENS[0].clone().requires_grad_())
