"""The gradient that each KL estimator has in the reward and in the loss, by exact enumeration.

One token of a small vocabulary is sampled; the expectation over it is a sum. What is measured is
the share of the gradient of KL(policy || reference) in what a placement gives: 1 is right.
"""

import re

import pytest
import torch

from lightrft.algorithms.advantages.token_level import broadcast_to_tokens
from lightrft.algorithms.kl import KL_ESTIMATORS, MAX_K3, estimate_kl, k3_kl
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


# ---- which gradient each estimator has in each placement, as the gradient of a closed form ----


def forward(p, r):
    return (p.exp() * (p - r)).sum()


def backward(p, r):
    return (r.exp() * (r - p)).sum()


def distance(p, r):
    """Twice the total variation."""
    return (p.exp() - r.exp()).abs().sum()


def half_square(p, r):
    return (p.exp() * (p - r).square() / 2).sum()


def absolute(p, r):
    return (p.exp() * (p - r).abs()).sum()


def nothing(p, r):
    return 0 * forward(p, r)


AS_LOSS = {
    "k1": nothing,
    "abs": distance,
    "k3": backward,
    "k3_unclamped": backward,
    **dict.fromkeys(("k2", "k1+", "k3+", "k1_is", "k2_is", "k3_is"), forward),
}
# In the reward only the value acts, and its own derivative is missing in the gradient.
AS_REWARD = {
    **dict.fromkeys(("k1", "k1+", "k1_is"), forward),
    "abs": lambda p, r: absolute(p, r) - distance(p, r),
    **dict.fromkeys(("k2", "k2_is"), lambda p, r: half_square(p, r) - forward(p, r)),
    **dict.fromkeys(
        ("k3", "k3_unclamped", "k3+", "k3_is"), lambda p, r: forward(p, r) - backward(p, r)
    ),
}
FORMS = {"loss": AS_LOSS, "reward": AS_REWARD}


@pytest.mark.parametrize("placement", FORMS)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_gradient_of_each_estimator_is_that_of_a_closed_form(estimator, placement):
    for policy in POLICIES.values():
        logits = policy.clone().requires_grad_()
        p, r = log_softmax(logits), log_softmax(reference())
        is_held = ((r - p).exp() - 1 + p - r > MAX_K3).any()
        if is_held and KL_ESTIMATORS[estimator].value is k3_kl:
            continue  # the bound of its value takes a part of the gradient
        (expected,) = torch.autograd.grad(FORMS[placement][estimator](p, r), logits)
        (found,) = torch.autograd.grad(objective(logits, estimator, placement), logits)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_k1_in_the_loss_is_named_without_effect():
    config = TrainConfig(init_kl_coef=0.1, use_kl_loss=True, kl_estimator="k1")
    assert [line for line in config.unused_options() if "kl_estimator" in line]


@pytest.mark.parametrize("estimator", [name for name in KL_ESTIMATORS if name != "k1"])
def test_in_the_reward_only_k1_is_accepted(estimator):
    message = f"kl_estimator {re.escape(estimator)} .* leave kl_estimator out .* use_kl_loss"
    grouped = {"init_kl_coef": 0.1, "kl_estimator": estimator, "n_samples_per_prompt": 2}
    (problem,) = algorithm_problems(TrainConfig(**grouped))
    assert re.search(message, problem)
    assert len(problem.splitlines()) == 1
    assert algorithm_problems(TrainConfig(**grouped, use_kl_loss=True)) == []
