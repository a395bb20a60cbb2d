"""Differences of the engine's logprobs from the trainer's, raw: nothing is clipped or left out.

With d_t = rollout_t - trainer_t, both logprobs of the sampled token t under the same distribution:

    logprob_diff_mean, logprob_diff_max    mean and largest |d_t|
    logprob_diff_exp                       mean exp|d_t|, 1 where both agree
    mismatch_kl_k1, mismatch_kl_k3         mean d_t and mean exp(-d_t) - 1 + d_t: estimates of the
                                           KL divergence of the engine from the trainer
    logprob_pearson                        correlation of the two
    sequence_log_ratio_min, .._max         extremes over responses of sum_t(-d_t)
    sequence_diff_max                      largest mean |d_t| of one response

Where prompts have images or videos, `logprob_diff_mean/text`, `.../media` and the same of
`logprob_diff_max` tell rows without and with media apart: an encoder that differs in the engine
shows in the latter alone.

Source of the estimators: Schulman, "Approximating KL divergence", 2020.
"""

import math

import torch
from torch import Tensor

from lightrft.stages.metrics import StepMetrics


@torch.no_grad()
def record_mismatch(
    rollout_logprobs: Tensor, logprobs: Tensor, compared_mask: Tensor, metrics: StepMetrics
) -> None:
    """Adds what rows of a step say about the difference between engine and trainer.

    Args:
        rollout_logprobs, logprobs: [batch, seq] of the engine and of the trainer.
        compared_mask: [batch, seq] bool, tokens for which both follow the same distribution.
        metrics: Receives the numbers.
    """
    mask = compared_mask
    rollout = torch.where(mask, rollout_logprobs.detach().double(), 0.0)
    trainer = torch.where(mask, logprobs.detach().double(), 0.0)
    difference = rollout - trainer
    size = difference.abs()
    metrics.add_masked_mean("logprob_diff_mean", size, mask)
    metrics.add_max("logprob_diff_max", _largest(size, mask))
    metrics.add_masked_mean("logprob_diff_exp", size.exp(), mask)
    metrics.add_masked_mean("mismatch_kl_k1", difference, mask)
    # expm1(-d) + d = exp(-d) - 1 + d, without the cancellation near 0.
    metrics.add_masked_mean("mismatch_kl_k3", (-difference).expm1() + difference, mask)
    parts = (mask, rollout, trainer, rollout.square(), trainer.square(), rollout * trainer)
    metrics.add_sums(
        "logprob_pearson", torch.stack([part.double().sum() for part in parts]), pearson
    )
    rows = mask.any(dim=1)
    counts = mask.sum(dim=1).clamp(min=1)
    log_ratio = -difference.sum(dim=1)
    metrics.add_max("sequence_log_ratio_max", _largest(log_ratio, rows))
    metrics.add_min("sequence_log_ratio_min", -_largest(-log_ratio, rows))
    metrics.add_max("sequence_diff_max", _largest(size.sum(dim=1) / counts, rows))


@torch.no_grad()
def record_by_media(
    rollout_logprobs: Tensor,
    logprobs: Tensor,
    compared_mask: Tensor,
    has_media: Tensor,
    metrics: StepMetrics,
) -> None:
    """Adds mean and largest difference of rows without and with media apart.

    Args:
        rollout_logprobs, logprobs, compared_mask, metrics: See `record_mismatch`.
        has_media: [batch] bool, rows with images or videos.
    """
    size = torch.where(compared_mask, rollout_logprobs.double() - logprobs.double(), 0.0).abs()
    for name, rows in (("text", ~has_media), ("media", has_media)):
        mask = compared_mask & rows[:, None]
        metrics.add_masked_mean(f"logprob_diff_mean/{name}", size, mask)
        metrics.add_max(f"logprob_diff_max/{name}", _largest(size, mask))


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """The largest marked value, NaN if one of them is; -inf without any."""
    kept = torch.where(mask, values, -torch.inf).flatten()
    return torch.cat([kept, kept.new_tensor([-torch.inf])]).max()


def pearson(sums: Tensor) -> float | None:
    """The correlation; None where one side is constant.

    Args:
        sums: [6] float64: count, sums, sums of squares and sum of products over the mask.
    """
    count, left, right, left_squares, right_squares, products = sums.tolist()
    if count < 2:
        return None
    left_variance = left_squares / count - (left / count) ** 2
    right_variance = right_squares / count - (right / count) ** 2
    # Below the rounding of the sums a variance is not told from 0. NaN passes, to be seen.
    floor = 1e-12
    if left_variance <= floor * left_squares / count:
        return None
    if right_variance <= floor * right_squares / count:
        return None
    covariance = products / count - left / count * (right / count)
    scale = left_variance * right_variance
    return covariance / math.sqrt(scale) if math.isfinite(scale) else math.nan
