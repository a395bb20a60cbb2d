"""The audit's formulas and derivatives are those of the run; its decisions at bounds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from lightrft.algorithms.advantages.row_level import estimate_row_advantages
from lightrft.algorithms.aggregation import aggregate, local_normalizer
from lightrft.algorithms.interface import RowAdvantageInputs
from lightrft.algorithms.kl import estimate_kl
from lightrft.algorithms.value import clipped_value_loss
from lightrft.config import TrainConfig
from lightrft.config.registry import (
    ADVANTAGE_ESTIMATORS,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES as LOSSES_OF_RUNS,
    bind,
)
from lightrft.strategy.optimizers import LearningRatePlan
from lightrft.tools.audit import advantages as adv
from lightrft.tools.audit.corrections import Borders, Pair
from lightrft.tools.audit.losses import (
    POLICY_LOSSES,
    Batch,
    kl_term,
    normalizer,
    token_shares,
    value_term,
)
from lightrft.tools.audit.optimizers import learning_rate
from lightrft.tools.audit.record import OptimizerFacts

DRAW = np.random.default_rng(4)
# Ratios on both sides of every bound, of advantages of both signs.
MASK = DRAW.random((5, 9)) < 0.7
MASK[-1] = False
OLD = np.where(MASK, -DRAW.exponential(1.0, MASK.shape), 0.0)
NEW = np.where(MASK, OLD + DRAW.normal(0, 0.4, MASK.shape), 0.0)
A = np.where(MASK, DRAW.normal(0, 1, MASK.shape), 0.0)
BORDERS = Borders(1e-9)


def both(values):
    return Pair(values, values)


def value_and_slopes(function, values):
    """Return a function's value, and its derivative by each of the values."""
    leaf = torch.tensor(values, requires_grad=True)
    total = function(leaf)
    total.backward()
    return total.item(), leaf.grad.numpy()


def assert_equal(term, wanted, factor=1.0):
    value, slopes = wanted
    assert factor * term.value.sum() == pytest.approx(value, rel=1e-10)
    np.testing.assert_allclose(factor * term.slope, slopes, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in POLICY_LOSSES),
        ("ppo", {"dual_clip": 1.3}),
        ("gspo", {"clip_low": 0.2, "clip_high": 0.2}),
        ("gmpo", {"max_log_fall": 0.1}),
        ("cpgd", {"drift_coef": 0.1, "drift_cap": 0.2}),
        ("clip_cov", {"cov_ratio": 0.2, "cov_low": 0.01}),
        ("kl_cov", {"cov_ratio": 0.3, "kl_coef": 0.5}),
    ],
)
def test_a_policy_loss_and_its_derivatives_are_those_of_the_run(name, options, mode):
    loss, entry = bind(LOSSES_OF_RUNS.load(name), options, owner=name), POLICY_LOSSES[name]
    old, advantages, mask = map(torch.tensor, (OLD, A, MASK))
    z = local_normalizer(mask, mode, max_response_tokens=8)

    def of_run(new):
        return aggregate(loss(new, old, advantages, mask).loss, mask, mode, z)

    weights = token_shares(MASK, mode) / normalizer(MASK, mode, 8)
    batch = Batch(both(NEW), both(OLD), A, MASK, weights, BORDERS)
    assert_equal(entry.term(batch, {**entry.defaults, **options}), value_and_slopes(of_run, NEW))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_a_kl_term_and_its_derivatives_are_those_of_the_run(name):
    reference = NEW + DRAW.normal(0, 0.5, NEW.shape)
    reference[0, np.flatnonzero(MASK[0])[0]] += 9.0  # above the bound of k3

    def of_run(new):
        ref, old, mask = map(torch.tensor, (reference, OLD, MASK))
        return estimate_kl(new, ref, mask, estimator=name, old_logprobs=old).sum()

    term = kl_term(name, both(NEW), both(reference), both(OLD), MASK, BORDERS)
    assert_equal(term, value_and_slopes(of_run, NEW))


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_value_loss_and_its_derivatives_are_those_of_the_run(clip):
    def of_run(values):
        old, target, mask = map(torch.tensor, (OLD, A, MASK))
        return clipped_value_loss(values, old, target, mask, clip=clip or None).sum()

    term = value_term(both(NEW), both(OLD), A, MASK, clip=clip, borders=BORDERS)
    assert_equal(term, value_and_slopes(of_run, NEW))


# A group of unequal rewards with a row that failed, one of equal rewards, one of two rows.
SCORES = adv.Scores(
    np.array([1.0, 0.0, 0.5, 1.0, 0.2, 1, 1, 1, 3, 0.5]),
    np.full(10, 0.5),
    np.repeat([0, 1, 2], [5, 3, 2]),
    np.array([4, 2, 6, 3, 5, 2, 2, 3, 1, 7]),
    np.arange(10) != 2,
    {"exact": np.array([1.0, 0, 1, np.nan, 1, 0, 0, 0, 2, 1])},
)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in adv.ESTIMATORS if name not in adv.TOKEN_ESTIMATORS),
        ("group_mean_batch_std", {"eps": 1e-2}),
        ("cpgd", {"weighting": "clip_filter"}),
        ("cpgd", {"weighting": "centre"}),
        ("gpg", {"max_weight": 1.2}),
        ("gdpo", {"components": "exact"}),
    ],
)
def test_advantages_of_rows_are_those_of_the_run(name, options):
    estimator = bind(ADVANTAGE_ESTIMATORS.load(name), options, owner=name)
    inputs = RowAdvantageInputs(
        *map(torch.tensor, (SCORES.rewards, SCORES.groups, SCORES.lengths, SCORES.greedy)),
        is_scored=torch.tensor(SCORES.is_kept),
        components={part: torch.tensor(each) for part, each in SCORES.components.items()},
    )
    wanted = estimate_row_advantages(estimator, inputs)
    found = adv.row_advantages(name, SCORES, options)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6, atol=1e-7)


def test_rewards_that_differ_by_rounding_alone_are_equal():
    scores = dataclasses.replace(SCORES, rewards=np.full_like(SCORES.rewards, 0.3))
    scores.rewards[0] = 0.1 + 0.2
    for name in ("group_norm", "rloo", "gpg", "maxrl"):
        assert not adv.row_advantages(name, scores, {}).any()


@pytest.mark.parametrize("changed_at", [-1, 4])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine_with_min_lr"])
def test_learning_rates_are_those_of_the_run(name, changed_at):
    config = TrainConfig(lr_warmup_ratio=0.2, min_lr_ratio=0.1, lr_scheduler=name)
    plan = LearningRatePlan(name, 2, 10, 0.1, changed_at, -0.3)
    facts = OptimizerFacts("AdamW", [], 0, 10)
    facts = dataclasses.replace(facts, schedule_changed_at=changed_at, schedule_gap=-0.3)
    steps = range(max(changed_at, 0), 12)
    found = [learning_rate(2.0, step, 10, facts, config) for step in steps]
    assert found == pytest.approx([2 * plan(step) for step in steps])


def test_a_decision_within_rounding_of_a_bound_is_the_run_s():
    borders = Borders(1e-3)
    own, run = np.array([1.0001, 1.0001, 1.5]), np.array([0.9999, 1.0002, 0.9])
    assert borders.above(Pair(own, run), 1.0).tolist() == [False, True, True]
    assert borders.num_taken == 1
