"""The gradient that each KL estimator has in the reward and in the loss, by exact enumeration.

One token of a small vocabulary is sampled; the expectation over it is a sum. What is measured is
the share of the gradient of KL(policy || reference) in what a placement gives: 1 is right.
"""

from __future__ import annotations

import re

import pytest
import torch

from lightrft.algorithms.advantages.token_level import broadcast_to_tokens
from lightrft.algorithms.kl import estimate_kl
from lightrft.algorithms.policy.clipped import clipped_policy_loss
from lightrft.config import TrainConfig
from lightrft.stages.policy.algorithm import algorithm_problems

SIZE = 10


def reference():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(SIZE, generator=draw, dtype=torch.float64)


def near(distance):
    draw = torch.Generator().manual_seed(1)
    return reference() + distance * torch.randn(SIZE, generator=draw, dtype=torch.float64)


POLICIES = {
    "0.01 away": near(0.01),
    "0.1 away": near(0.1),
    "1.2 times": 1.2 * reference(),
    "twice": 2 * reference(),
    "three times": 3 * reference(),
}


def log_softmax(logits):
    return torch.log_softmax(logits, -1)[:, None]


def divergence(logits, ref):
    p = log_softmax(logits)
    return (p.exp() * (p - log_softmax(ref))).sum()


def objective(logits, estimator, placement):
    """Expected loss over every token as a response of its own, sampled from the policy."""
    p, mask = log_softmax(logits), torch.ones(SIZE, 1, dtype=torch.bool)
    old = p.detach()
    if placement == "loss":
        kl = estimate_kl(p, log_softmax(reference()), mask, estimator=estimator, old_logprobs=old)
        return (old.exp() * kl).sum()
    kl = estimate_kl(old, log_softmax(reference()), mask, estimator=estimator, old_logprobs=old)
    zero = torch.zeros(SIZE, dtype=torch.float64)
    advantages = broadcast_to_tokens(zero, mask, kl=kl, kl_coef=1.0).advantages
    return (old.exp() * clipped_policy_loss(p, old, advantages, mask).loss).sum()


def share(policy, estimator, placement):
    logits = policy.clone().requires_grad_()
    (true,) = torch.autograd.grad(divergence(logits, reference()), logits)
    (found,) = torch.autograd.grad(objective(logits, estimator, placement), logits)
    return float(found @ true / (true @ true))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_the_default_is_the_gradient_of_the_divergence(placement, name):
    config = TrainConfig(init_kl_coef=0.1, use_kl_loss=placement == "loss")
    assert 0.97 < share(POLICIES[name], config.kl_estimator_name, placement) < 1.03


@pytest.mark.parametrize("estimator", ["k1+", "k2", "k3+", "k1_is", "k2_is", "k3_is"])
@pytest.mark.parametrize("name", POLICIES)
def test_estimators_in_the_loss_that_have_exactly_its_gradient(estimator, name):
    assert share(POLICIES[name], estimator, "loss") == pytest.approx(1.0, abs=1e-9)


def test_k3_in_the_loss_has_the_gradient_of_the_other_direction():
    for policy in POLICIES.values():
        logits = policy.clone().requires_grad_()
        p, r = log_softmax(logits), log_softmax(reference())
        (other,) = torch.autograd.grad((r.exp() * (r - p)).sum(), logits)
        (found,) = torch.autograd.grad(objective(logits, "k3_unclamped", "loss"), logits)
        torch.testing.assert_close(found, other)
    assert share(POLICIES["twice"], "k3", "loss") > 1.1


def test_k1_in_the_loss_has_no_expected_gradient_and_is_named_without_effect():
    assert share(POLICIES["twice"], "k1", "loss") == pytest.approx(0.0, abs=1e-9)
    config = TrainConfig(init_kl_coef=0.1, use_kl_loss=True, kl_estimator="k1")
    assert [line for line in config.unused_options() if "kl_estimator" in line]


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs", "k3_unclamped", "k3_is", "k3+"])
def test_in_the_reward_only_k1_is_accepted(estimator):
    shares = [share(policy, estimator, "reward") for policy in POLICIES.values()]
    assert min(shares) < 0.5, shares
    message = f"kl_estimator {re.escape(estimator)} .* leave kl_estimator out .* use_kl_loss"
    grouped = {"init_kl_coef": 0.1, "kl_estimator": estimator, "n_samples_per_prompt": 2}
    (problem,) = algorithm_problems(TrainConfig(**grouped))
    assert re.search(message, problem)
    assert len(problem.splitlines()) == 1
    assert algorithm_problems(TrainConfig(**grouped, use_kl_loss=True)) == []


def descend(estimator, placement):
    """The divergence after 400 steps of the penalty alone, from a policy twice as peaked."""
    logits = (2 * reference()).requires_grad_()
    for _ in range(400):
        (slope,) = torch.autograd.grad(objective(logits, estimator, placement), logits)
        logits = (logits - 0.1 * slope).detach().requires_grad_()
    return float(divergence(logits.detach(), reference()))


def test_the_penalty_alone_leads_back_to_the_reference():
    begin = float(divergence(2 * reference(), reference()))
    assert descend("k1", "reward") < 0.5 * begin
    assert descend("k3+", "loss") < 0.5 * begin
    assert descend("k3", "reward") > begin


def test_no_reference_model_is_loaded_unless_it_is_asked_for():
    assert TrainConfig().init_kl_coef == 0
