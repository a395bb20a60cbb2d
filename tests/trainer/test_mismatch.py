"""Raw differences between the engine's and the trainer's logprobs against a plain loop."""

import math

import numpy as np
import pytest
import torch

from lightrft.algorithms.policy.clipped import clipped_policy_loss
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.policy.step_metrics import record_mismatch, record_ratios
from lightrft.strategy import get_fake_strategy


def recorded(*parts):
    metrics = StepMetrics()
    for rollout, trainer, mask in parts:
        record_mismatch(rollout, trainer, mask, metrics)
    return metrics.reduce(get_fake_strategy().context)


def slow(rollout, trainer, mask):
    """Every number from its definition."""
    rollout, trainer = rollout.double().numpy(), trainer.double().numpy()
    rows = [(r[m], t[m]) for r, t, m in zip(rollout, trainer, mask.numpy(), strict=True) if m.any()]
    r, t = map(np.concatenate, zip(*rows, strict=True))
    ratios = [(t - r).sum() for r, t in rows]
    return {
        "logprob_diff_mean": abs(r - t).mean(),
        "logprob_diff_max": abs(r - t).max(),
        "logprob_diff_exp": np.exp(abs(r - t)).mean(),
        "mismatch_kl_k1": (r - t).mean(),
        "mismatch_kl_k3": (np.exp(t - r) - 1 + r - t).mean(),
        "logprob_pearson": np.corrcoef(r, t)[0, 1],
        "sequence_log_ratio_min": min(ratios),
        "sequence_log_ratio_max": max(ratios),
        "sequence_diff_max": max(abs(r - t).mean() for r, t in rows),
    }


@pytest.fixture
def rows():
    torch.manual_seed(5)
    rollout = -3 * torch.rand(6, 9)
    trainer = rollout + 0.3 * torch.randn(6, 9)
    mask = torch.rand(6, 9) < 0.6
    mask[2] = False
    return rollout, trainer, mask


def test_numbers_are_those_of_their_definitions(rows):
    assert recorded(rows) == pytest.approx(slow(*rows), rel=1e-6)


def test_micro_batches_join_exactly(rows):
    parts = [tuple(part[i : i + 2] for part in rows) for i in (0, 2, 4)]
    assert recorded(*parts) == pytest.approx(recorded(rows), rel=1e-12)


def test_nothing_is_clipped_and_nothing_outside_the_mask_counts():
    rollout = torch.tensor([[0.0, -1.0, -50.0, float("nan")]])
    trainer = torch.tensor([[0.0, -41.0, -2.0, 7.0]])
    mask = torch.tensor([[False, True, True, False]])
    found = recorded((rollout, trainer, mask))
    assert found["logprob_diff_max"] == 48
    assert found["mismatch_kl_k3"] == pytest.approx(
        (math.exp(-40.0) - 1 + 40.0 + math.exp(48.0) - 1 - 48.0) / 2
    )
    assert found["sequence_log_ratio_max"] == found["sequence_log_ratio_min"] == 8


def test_a_logprob_that_is_not_a_number_is_seen():
    rollout, trainer = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, float("nan")]])
    found = recorded((rollout, trainer, torch.ones(1, 2, dtype=torch.bool)))
    assert math.isnan(found["logprob_diff_max"])
    assert math.isnan(found["logprob_diff_mean"])
    assert math.isnan(found["sequence_diff_max"])


def test_a_step_without_comparable_tokens_has_no_such_metrics():
    zeros = torch.zeros(2, 3)
    assert recorded((zeros, zeros, torch.zeros(2, 3, dtype=torch.bool))) == {}


def test_the_correlation_of_far_numbers_keeps_its_digits():
    generator = torch.Generator().manual_seed(3)
    rollout, noise = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.ones(4, 6, dtype=torch.bool)
    near = recorded((rollout, rollout + noise, mask))["logprob_pearson"]
    far = recorded(
        *(
            (r[None] - 1e7, (r + n)[None] - 1e7, m[None])
            for r, n, m in zip(rollout, noise, mask, strict=True)
        )
    )["logprob_pearson"]
    assert far == pytest.approx(near, rel=1e-6)


def test_one_token_far_away_leaves_the_size_of_an_update_finite():
    metrics, mask = StepMetrics(), torch.ones(1, 2, dtype=torch.bool)
    logprobs, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -91.0]])
    loss = clipped_policy_loss(logprobs, old, torch.ones(1, 2), mask)
    record_ratios(loss, logprobs, old, mask, metrics)
    found = metrics.reduce(get_fake_strategy().context)
    assert found["approx_kl"] == pytest.approx((math.exp(20) - 21) / 2)
    assert found["clamped_share"] == 0.5


def test_constant_logprobs_have_no_correlation():
    ones = torch.ones(2, 3)
    found = recorded((-ones, -ones, torch.ones(2, 3, dtype=torch.bool)))
    assert "logprob_pearson" not in found
    assert found["logprob_diff_exp"] == 1.0
