"""The audit's own formulas against worked numbers, and its derivatives against differences."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from lightrft.config import TrainConfig
from lightrft.tools.audit import advantages as adv
from lightrft.tools.audit.corrections import PRESETS, Tokens, correction, parse
from lightrft.tools.audit.losses import (
    POLICY_LOSSES,
    Batch,
    kl_term,
    normalizer,
    token_shares,
    value_term,
)
from lightrft.tools.audit.optimizers import Optimizer, ParameterNumbers, learning_rate
from lightrft.tools.audit.pairs import Borders, Pair, differentiated
from lightrft.tools.audit.record import OptimizerFacts, RawSamples
from lightrft.tools.audit.samples import shaped_rewards

MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=bool)
OLD = np.array([[-1.0, -0.5, -2.0, -0.7], [-0.9, -1.6, 0, 0]])
NEW = np.array([[-0.7, -0.6, -1.4, -1.3], [-1.5, -0.4, 0, 0]])
REF = np.array([[-0.9, -0.8, -1.0, -1.1], [-1.1, -0.9, 0, 0]])
ROLLOUT = np.array([[-1.1, -0.5, -1.0, -0.75], [-0.9, -2.9, 0, 0]])
A = np.where(MASK, np.array([[1.0], [-0.5]]), 0.0)


TOKENS = torch.from_numpy(MASK)


def both(values):
    return Pair(torch.from_numpy(values), torch.from_numpy(values))


def by_p(formula, p=NEW):
    """Sum of the values of a formula, and its derivative by each log-probability."""
    found = differentiated(formula, both(p), Borders(1e-9))
    return float(found.value.sum()), found.slope.numpy()


def weighted(name, weights, advantages=A, **given):
    """A policy loss as a formula."""
    entry, of_tokens = POLICY_LOSSES[name], torch.from_numpy(advantages)

    def formula(p, borders):
        batch = Batch(p, both(OLD), of_tokens, TOKENS, borders)
        return weights * entry.function(batch, {**entry.defaults, **given})

    return formula


def loss(name, p=NEW, mode=None, advantages=A, **given):
    """Value of the batch and derivative by each log-probability."""
    mode = mode or POLICY_LOSSES[name].aggregation
    weights = token_shares(TOKENS, mode) / normalizer(TOKENS, mode, 8)
    return by_p(weighted(name, weights, advantages, **given), p)


@pytest.mark.parametrize(
    ("name", "given", "value", "slopes"),
    [
        ("ppo", {"mode": "token-mean"}, -0.298932, [0, -0.150806, 0, -0.091469, 0, 0.276676]),
        ("ppo", {"mode": "seq-mean-token-sum"}, -0.896795, None),
        ("ppo", {}, 0.033308, None),
        ("dr_grpo", {}, -0.112099, None),
        ("ppo", {"mode": "token-mean", "dual_clip": 3.0}, -0.325608, None),
        ("dapo", {}, -0.325598, [0, -0.150806, 0, -0.091469, 0, 0.276676]),
        ("gspo", {}, -0.162735, [0, 0, 0, 0, 0.168732, 0.168732]),
        (
            "gspo",
            {"clip_low": 0.2, "clip_high": 0.2},
            -0.188171,
            [-0.131409, -0.131409, -0.131409, -0.131409, 0.168732, 0.168732],
        ),
        ("gmpo", {}, -0.127044, [-0.125, -0.125, 0, -0.125, 0, 0.186478]),
        ("cpgd", {"drift_coef": 0.0}, 0.376527, [0, -0.125, 0, -0.125, 0, 0.125]),
        (
            "cpgd",
            {"drift_coef": 0.01},
            0.375278,
            [0.000437, -0.125119, 0.001028, -0.125564, -0.001128, 0.13],
        ),
        ("cispo", {}, 0.546125, [-0.213333, -0.150806, -0.213333, -0.091469, 0.045734, 0.106667]),
        ("sapo", {}, -0.452683, [-0.163673, -0.112849, -0.193233, -0.065225, 0.064892, 0.12282]),
        ("reinforce", {}, 0.508333, [-1 / 6] * 4 + [0.083333] * 2),
        (
            "kl_cov",
            {"cov_ratio": 0.34},
            -0.33186,
            [-0.224976, -0.317473, -0.303686, -0.091469, -0.120932, 0.276676],
        ),
    ],
)
def test_policy_losses_have_the_worked_values(name, given, value, slopes):
    found, slope = loss(name, **given)
    assert found == pytest.approx(value, abs=1e-6)
    if slopes is not None:
        assert slope[MASK] == pytest.approx(np.array(slopes), abs=1e-6)


def test_gspo_token_takes_the_advantage_of_each_token():
    own = np.array([[1, 0.5, 1.5, 1], [-0.5, -1, 0, 0]])
    found, slope = loss("gspo-token", advantages=own, clip_low=0.2, clip_high=0.2)
    assert found == pytest.approx(-0.019438, abs=1e-6)
    wanted = [-0.131409, -0.065704, -0.197113, -0.131409, 0.168732, 0.337465]
    assert slope[MASK] == pytest.approx(np.array(wanted), abs=1e-6)


def assert_slopes_are_differences(formula):
    """The finite differences of a formula are its derivatives."""
    _, slope = by_p(formula)
    for row, t in np.argwhere(MASK):
        step = np.zeros_like(NEW)
        step[row, t] = 1e-6
        change = (by_p(formula, NEW + step)[0] - by_p(formula, NEW - step)[0]) / 2e-6
        assert slope[row, t] == pytest.approx(change, abs=1e-7)


# The derivatives of the others are those of their papers, not of their values.
SMOOTH = sorted(POLICY_LOSSES.keys() - {"gspo-token", "cpgd", "cispo"})


@pytest.mark.parametrize("name", SMOOTH)
def test_slopes_of_policy_losses_are_derivatives(name):
    given = {"clip_low": 0.2, "clip_high": 0.2} if "gspo" in name else {}
    assert_slopes_are_differences(weighted(name, token_shares(TOKENS, "token-mean"), **given))


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "k3_unclamped"])
def test_slopes_of_kl_terms_are_derivatives(name):
    assert_slopes_are_differences(
        lambda p, borders: kl_term(name, p, both(REF), both(OLD), TOKENS, borders)
    )


def test_slopes_of_the_value_loss_are_derivatives():
    target, how = torch.from_numpy(REF), {"clip": 0.25}
    assert_slopes_are_differences(
        lambda values, borders: value_term(
            values, both(OLD), target, TOKENS, borders=borders, **how
        )
    )


@pytest.mark.parametrize(
    ("name", "value", "slopes"),
    [
        ("k1", -0.016667, [1 / 6] * 6),
        ("k2", 0.0575, [0.033333, 0.033333, -0.066667, -0.033333, -0.066667, 0.083333]),
        ("k3", 0.058174, [0.030212, 0.030212, -0.081971, -0.0369, -0.081971, 0.065578]),
        ("k1+", -0.016667, [0.033333, 0.033333, -0.066667, -0.033333, -0.066667, 0.083333]),
        ("k3+", 0.058174, [0.033333, 0.033333, -0.066667, -0.033333, -0.066667, 0.083333]),
        ("k1_is", 0.175477, [0.269972, 0.180967, 0.182212, 0.073175, 0.054881, 0.830029]),
        ("k2_is", 0.110127, [0.044995, 0.030161, -0.121475, -0.018294, -0.036587, 0.276676]),
        ("k3_is", 0.10423, [0.044995, 0.030161, -0.121475, -0.018294, -0.036587, 0.276676]),
    ],
)
def test_kl_terms_have_the_worked_values(name, value, slopes):
    found, slope = by_p(lambda p, borders: kl_term(name, p, both(REF), both(OLD), TOKENS, borders))
    assert found / 6 == pytest.approx(value, abs=1e-6)
    assert slope[MASK] / 6 == pytest.approx(np.array(slopes), abs=1e-6)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("tis", 0.078445),
        ("weight:ratio:token reject:ratio:token:low=0.5:high=2", -0.401332),
        ("mis", -0.274518),
        ("tis-sequence", 0.412168),
        ("tis-geometric", 0.13837),
        ("weight:ratio:token reject:ratio:geometric:low=0.8:high=1.25", -0.541575),
    ],
)
def test_corrections_have_the_worked_values(text, value):
    terms = parse(TrainConfig(off_policy_correction=PRESETS.get(text, text)))
    tokens = Tokens(both(OLD), torch.from_numpy(ROLLOUT), both(A), TOKENS)
    weights = correction(terms, tokens, Borders(1e-9))
    assert by_p(weighted("ppo", weights / 6))[0] == pytest.approx(value, abs=1e-6)


SCORES = adv.Scores(
    np.array([1.0, 0.0, 0.5, 1.0, 1, 1, 1, 1]),
    np.full(8, 0.5),
    np.repeat([0, 1], 4),
    np.array([4, 2, 6, 3, 2, 2, 3, 3]),
    np.ones(8, dtype=bool),
)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("group_norm", {}, [0.783348, -1.30558, -0.261116, 0.783348]),
        ("dr_grpo", {}, [0.375, -0.625, -0.125, 0.375]),
        ("rloo", {}, [0.5, -0.833333, -0.166667, 0.5]),
        ("opo", {}, [0.333333, -0.666667, -0.166667, 0.333333]),
        ("remax", {}, [0.5, -0.5, 0, 0.5]),
        ("group_mean_batch_std", {"eps": 1e-4}, [1.007761, -1.679602, -0.33592, 1.007761]),
        ("cpgd", {"weighting": "clip_filter"}, [0.75, -1.25, -0.25, 0.75]),
        ("batch_mean_group_std", {}, [0.391674, -1.697254, -0.65279, 0.391674]),
        ("maxrl", {}, [0.599999, -0.999998, -0.2, 0.599999]),
        ("pass_at_k", {}, [0, 0, 0, 0]),
        ("raft", {}, [25 / 4, 0, 0, 0]),
        ("gdpo", {}, [1.196584, -1.994307, -0.398861, 1.196584]),
        ("gpg", {}, [0.75, -1.25, -0.25, 0.75]),
        ("gpg", {"max_weight": 1.0}, [0.375, -0.625, -0.125, 0.375]),
    ],
)
def test_row_advantages_have_the_worked_values(name, given, wanted):
    found = adv.row_advantages(name, SCORES, given)
    assert found[:4] == pytest.approx(np.array(wanted), abs=1e-6)
    assert name == "remax" or (found[4:] == 0).all()


def test_rewards_that_differ_by_rounding_alone_are_equal():
    scores = dataclasses.replace(SCORES, rewards=np.full_like(SCORES.rewards, 0.3))
    scores.rewards[0] = 0.1 + 0.2
    for name in ("group_norm", "rloo", "gpg", "maxrl"):
        assert not adv.row_advantages(name, scores, {}).any()


def test_a_failed_row_has_no_part_in_its_group():
    kept = np.array([True, True, True, False, *[True] * 4])
    found = adv.row_advantages("dr_grpo", dataclasses.replace(SCORES, is_kept=kept), {})
    assert found[:4] == pytest.approx(np.array([0.5, -0.5, 0, 0]))


def test_returns_whitening_and_gae_have_the_worked_values():
    kl = 0.1 * np.where(MASK, OLD - REF, 0.0)
    shaped = adv.token_rewards(np.array([1.0, 0.0]), MASK, kl, np.zeros(MASK.shape))
    found = adv.returns(shaped, MASK, TrainConfig())
    assert found[MASK] == pytest.approx(np.array([1.04, 1.03, 1.06, 0.96, 0.05, 0.07]))
    white, _ = adv.whitened(found, MASK)
    wanted = [0.743909, 0.721922, 0.787884, 0.56801, -1.43285, -1.388875]
    assert white[MASK] == pytest.approx(np.array(wanted), abs=1e-6)
    rewards, values = np.array([[0.0, 0, 0, 1]]), np.array([[0.5, 0.4, 0.3, 0.2]])
    whole = np.ones((1, 4), dtype=bool)
    settings = TrainConfig(gamma=0.9, lambd=0.8)
    found = adv.gae(rewards, values, whole, settings)
    assert found[0] == pytest.approx(np.array([0.00279, 0.19832, 0.456, 0.8]), abs=1e-5)
    gap = np.array([[True, True, False, True]])
    found = adv.gae(rewards, values, gap, settings)
    assert found[gap] == pytest.approx(np.array([0.11632, 0.356, 0.8]), abs=1e-5)
    # Over turns: the discount acts once, between the second token and the fourth.
    by_turn = dataclasses.replace(settings, turn_credit="discounted")
    assert adv.returns(rewards, gap, by_turn)[gap] == pytest.approx(np.array([0.9, 0.9, 1.0]))
    found = adv.gae(rewards, values, gap, by_turn)
    # 0.8; 0.9 * 0.2 - 0.4 + 0.72 * 0.8; 0.4 - 0.5 + 0.8 * 0.356
    assert found[gap] == pytest.approx(np.array([0.1848, 0.356, 0.8]), abs=1e-9)


def test_the_value_loss_has_the_worked_values():
    new, old = np.array([[0.9, 0.1, 0.5, 0.9]]), np.array([[0.5, 0.4, 0.3, 0.2]])
    target = torch.tensor([[0.50279, 0.59832, 0.756, 1.0]], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    found, slope = by_p(
        lambda p, borders: value_term(p, both(old), target, mask, clip=0.2, borders=borders), new
    )
    assert found / 4 == pytest.approx(0.103954, abs=1e-6)
    assert slope[0] / 4 == pytest.approx(np.array([0.099302, -0.12458, -0.064, 0]), abs=1e-5)


def test_rates_and_steps_have_the_worked_values():
    config = TrainConfig(lr_warmup_ratio=0.2, min_lr_ratio=0.1)
    facts = OptimizerFacts("AdamW", [], 0, 10)
    found = [learning_rate(1.0, s, 10, facts, config) for s in range(11)]
    wanted = [1, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1]
    assert found == pytest.approx([1 / 3, 2 / 3, *wanted], abs=1e-6)
    longer = dataclasses.replace(facts, schedule_changed_at=4, schedule_gap=-0.3)
    found = [learning_rate(1.0, s, 10, longer, config) for s in (4, 5, 6)]
    assert found == pytest.approx([0.868198 - 0.2, 0.722208 - 0.1, 0.55], abs=1e-6)
    for decay, after in ((0.1, 0.89), (0.0, 0.9)):
        weights = {"w": torch.tensor([1.0], dtype=torch.float64)}
        group = ParameterNumbers(betas=(0.9, 0.95), weight_decay=decay)
        optimizer = Optimizer("AdamW", weights, {"w": group})
        optimizer.step({"w": torch.tensor([0.5], dtype=torch.float64)}, 0.1, 1.0)
        assert float(optimizer.weights["w"]) == pytest.approx(after)


def test_a_decision_within_rounding_of_a_bound_is_the_run_s():
    borders = Borders(1e-3)
    own, run = torch.tensor([1.0001, 1.0001, 1.5]), torch.tensor([0.9999, 1.0002, 0.9])
    assert borders.above(Pair(own, run), 1.0).tolist() == [False, True, True]
    assert borders.num_taken == 1


def test_a_greedy_baseline_is_shaped_like_the_rewards():
    rewards, greedy = np.array([10.0, 12.0, 10.0, 8.0]), np.full(4, 10.0)
    ones, none = np.ones(4, dtype=np.int64), np.zeros(4, dtype=np.bool_)
    samples = RawSamples(
        *(ones, ones, ones, 0 * ones, ones.astype(np.int32), none, np.zeros(4, np.float32)),
        *(rewards, rewards, none, ~none, greedy),
    )
    config = TrainConfig(
        advantage_estimator="remax", reward_running_norm=True, reward_running_norm_minus_mean=True
    )
    shaped, baseline, _ = shaped_rewards(samples, ~none, config, [0, 0.0, 0.0])
    std = np.sqrt(8 / 3)
    assert (shaped - baseline) * std == pytest.approx([0, 2, 0, -2])
    clipped = dataclasses.replace(config, reward_running_norm=False, reward_clip=11.0)
    shaped, baseline, _ = shaped_rewards(samples, ~none, clipped, [])
    assert shaped - baseline == pytest.approx([0, 1, 0, -2])
