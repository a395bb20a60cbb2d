"""The audit's losses of preferences and reward models have the numbers of the stages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightrft.algorithms import reward_losses
from lightrft.algorithms.interface import preference_loss_traits
from lightrft.algorithms.preference_losses import AnswerSums, PreferenceSums
from lightrft.config.registry import PREFERENCE_LOSSES, REWARD_LOSSES
from lightrft.tools.audit import reward_updates
from lightrft.tools.audit.pairs import Borders, Pair, differentiated
from lightrft.tools.audit.preference_losses import (
    Answers,
    Pairs,
    preference_loss_named,
)


def pairs(numbers, z=0.0):
    c, r, cr, rr, n_c, n_r = torch.as_tensor(numbers, dtype=torch.float64)
    chosen, rejected = (
        Answers(own, ref, n, own, ref) for own, ref, n in ((c, cr, n_c), (r, rr, n_r))
    )
    return Pairs(chosen, rejected, float(n_c.mean()), z, 1e-3)


def by_numbers(total, at):
    """A sum of values, and its derivatives, of numbers."""
    scores = torch.as_tensor(at, dtype=torch.float64)
    found = differentiated(lambda p, _: total(p.exact), Pair(scores, scores), Borders(0.0))
    return float(found.value.sum()), found.slope.numpy()


def assert_slopes_are_differences(total, at):
    """The finite differences of values that add up are their derivatives."""
    _, slopes = by_numbers(total, at)
    for place, slope in enumerate(slopes):
        step = np.zeros(len(at))
        step[place] = 1e-5
        change = (by_numbers(total, at + step)[0] - by_numbers(total, at - step)[0]) / 2e-5
        assert slope == pytest.approx(change, rel=1e-5, abs=1e-8)


def options(loss, given=()):
    return dict(loss.defaults) | dict(given)


def random_pairs(size=7):
    random = np.random.default_rng(5)
    tokens = random.integers(1, 40, (2, size)).astype(float)
    sums = -tokens * random.uniform(0.2, 3, (2, size))
    reference = sums + random.normal(size=(2, size)) * 3
    return np.array([*sums, *reference, *tokens])


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_preference_loss_and_its_derivatives_are_those_of_the_stage(name):
    numbers, function = random_pairs(), PREFERENCE_LOSSES.load(name)
    loss = preference_loss_named(name)
    assert loss.of_answers == preference_loss_traits(function).is_of_answers
    assert loss.has_reference == preference_loss_traits(function).uses_reference
    tensors = [torch.tensor(each, dtype=torch.float64) for each in numbers]
    for leaf in tensors[:2]:
        leaf.requires_grad_()
    c, r, cr, rr, n_c, n_r = tensors
    of_stage = PreferenceSums(
        AnswerSums(c, cr, n_c), AnswerSums(r, rr, n_r), float(n_c.mean()), 0.7
    )
    total = function(of_stage).sum()
    gradient = torch.cat(torch.autograd.grad(total, (c, r), materialize_grads=True))

    def own(sums):
        chosen, rejected = sums.chunk(2)
        found = pairs(numbers, 0.7)
        chosen, rejected = (
            replace(found.chosen, exact=chosen),
            replace(found.rejected, exact=rejected),
        )
        return loss.function(replace(found, chosen=chosen, rejected=rejected), options(loss))

    sums = np.concatenate(numbers[:2])
    value, slopes = by_numbers(own, sums)
    assert value == pytest.approx(total.item(), rel=1e-9)
    np.testing.assert_allclose(slopes, gradient.numpy(), rtol=1e-8, atol=1e-9)
    assert_slopes_are_differences(own, sums)


def test_equal_margins_keep_the_order_of_the_run():
    """Two margins that rounding alone tells apart, with references that are far apart."""
    numbers = np.array(
        [(-5.0, -5.0), (-6.0, -6.0 - 1e-7), (-5.0, -2.0), (-4.0, -9.0), (1, 1), (1, 1)]
    )
    loss = preference_loss_named("aot")
    found = pairs(numbers)

    def slopes(seen):
        seen = torch.tensor(seen, dtype=torch.float64)
        given = replace(found, chosen=replace(found.chosen, seen=seen))

        def total(sums):
            chosen = replace(given.chosen, exact=sums)
            return loss.function(replace(given, chosen=chosen), options(loss))

        return by_numbers(total, numbers[0])[1]

    forward, backward = slopes((-5.0, -5.0)), slopes((-5.0, -5.0 - 1e-6))
    assert abs(forward[0] - backward[1]) < 1e-6
    assert abs(forward[0] - forward[1]) > 1e-3


@pytest.mark.parametrize("name", REWARD_LOSSES)
def test_a_reward_loss_and_its_derivatives_are_those_of_the_stage(name):
    function = REWARD_LOSSES.load(name)
    own = reward_updates.REWARD_LOSSES[reward_updates.OTHER_NAMES.get(name, name)]
    random = np.random.default_rng(3)
    values, other = random.normal(size=9) * 3, random.random(9) < 0.4
    if function in (reward_losses.squared_error, reward_losses.binary_cross_entropy):
        other = random.random(9)
    leaf = torch.tensor(values, requires_grad=True)
    total = function(leaf, torch.tensor(other)).sum()
    total.backward()

    def of(scores):
        return own.function(scores, torch.tensor(other), own.defaults)

    value, slopes = by_numbers(of, values)
    assert value == pytest.approx(total.item(), rel=1e-9)
    np.testing.assert_allclose(slopes, leaf.grad.numpy(), rtol=1e-8)
    assert_slopes_are_differences(of, values)
