"""Off-policy correction weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightrft.algorithms import CORRECTIONS, aggregate, build_policy_loss, correction_weights
from lightrft.algorithms.corrections import off_policy_sequence_mask
from lightrft.algorithms.metrics import effective_sample_fraction, effective_sample_sums

TOKEN = [1.105171, 1.0, 0.367879, 1.051271, 1.0, 3.669297]
WORKED = [  # token-mean of the weighted PPO loss
    ("tis", {"high": 2.0}, 0.078445),
    ("icepop", {"low": 0.5, "high": 2.0}, -0.401332),
    ("mis", {"high": 3.0}, -0.274518),
    ("tis-sequence", {"high": 2.0}, 0.412168),
    ("tis-geometric", {"high": 2.0}, 0.13837),
    ("geometric", {"low": 0.8, "high": 1.25}, -0.541575),
]


@pytest.mark.parametrize(("mode", "bounds", "loss"), WORKED)
def test_worked_numbers(mode: str, bounds, loss: float, worked) -> None:
    result = correction_weights(worked.old, worked.rollout, worked.mask, mode=mode, **bounds)
    assert result.raw[worked.mask].tolist() == pytest.approx(TOKEN, abs=1e-6)
    ppo = build_policy_loss("ppo", {})(worked.new, worked.old, worked.advantages, worked.mask)
    value = aggregate(ppo.weighted(result.weights).loss, worked.mask, "token-mean", 6.0)
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert result.weights[~worked.mask].tolist() == [0.0, 0.0]


def test_every_registered_correction_is_covered_here() -> None:
    assert {mode for mode, _, _ in WORKED} == set(CORRECTIONS)


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_equals_a_loop_on_random_rows(mode: str, ragged) -> None:
    batch = ragged(5)
    low, high = (0.0, 1.1) if mode.startswith("tis") else (0.9, 1.1)
    result = correction_weights(
        torch.tensor(batch.old), torch.tensor(batch.rollout), torch.tensor(batch.mask),
        mode=mode, low=low, high=high,
    )  # fmt: skip
    expected, capped, rejected = np.zeros_like(batch.old), 0, 0
    for i, t in zip(*np.nonzero(batch.mask), strict=True):
        logs = (batch.old[i] - batch.rollout[i])[batch.mask[i]]
        token = np.exp(batch.old[i, t] - batch.rollout[i, t])
        level = {"sequence": np.exp(logs.sum()), "geometric": np.exp(logs.mean())}
        if mode == "mis":
            tested = applied = level["sequence"]
        elif mode == "geometric":
            tested, applied = level["geometric"], token
        else:
            tested = applied = level.get(mode.removeprefix("tis-"), token)
        if mode.startswith("tis"):
            expected[i, t] = min(applied, high)
            capped += applied > high
        else:
            inside = low <= tested <= high
            expected[i, t] = applied * inside
            rejected += not inside
    np.testing.assert_allclose(result.weights.numpy(), expected, atol=1e-12)
    assert (result.is_capped.sum(), result.is_rejected.sum()) == (capped, rejected)
    assert capped + rejected > 0


def test_long_rows_do_not_overflow() -> None:
    old, rollout = torch.zeros(1, 400), torch.full((1, 400), -3.0)
    mask = torch.ones(1, 400, dtype=torch.bool)
    for mode in CORRECTIONS:
        result = correction_weights(old, rollout, mask, mode=mode)
        assert torch.isfinite(result.weights).all()
        assert result.weights.dtype == torch.float32


def test_equal_policies_have_weight_one_under_every_mode(worked) -> None:
    for mode in CORRECTIONS:
        result = correction_weights(worked.old, worked.old, worked.mask, mode=mode)
        assert result.weights[worked.mask].tolist() == [1.0] * 6


def test_effective_sample_fraction(worked) -> None:
    weights = correction_weights(worked.old, worked.rollout, worked.mask, mode="tis").raw
    sums = effective_sample_sums(weights, worked.mask)
    assert effective_sample_fraction(sums) == pytest.approx(0.624202, abs=1e-6)
    assert effective_sample_fraction(torch.zeros(3)) == 0.0


def test_rows_that_drifted_are_dropped_only_with_a_negative_advantage() -> None:
    mask = torch.tensor([[True, True], [True, True], [True, False], [False, False]])
    rollout = torch.zeros(4, 2)
    logprobs = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-0.2, 9.0], [-9.0, -9.0]])
    advantages = torch.tensor([[-1.0] * 2, [1.0] * 2, [-1.0] * 2, [-1.0] * 2])
    kept = off_policy_sequence_mask(logprobs, rollout, advantages, mask, max_divergence=0.5)
    assert kept.tolist() == [[False] * 2, [True] * 2, [True, False], [False] * 2]


def test_bad_bounds_and_names_are_errors(worked) -> None:
    arguments = (worked.old, worked.rollout, worked.mask)
    with pytest.raises(ValueError, match="did you mean 'tis'"):
        correction_weights(*arguments, mode="tiss")
    with pytest.raises(ValueError, match="0 <= low < high"):
        correction_weights(*arguments, mode="icepop", low=3.0, high=2.0)
    with pytest.raises(ValueError, match="caps from above only"):
        correction_weights(*arguments, mode="tis", low=0.5)
