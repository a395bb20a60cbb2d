"""Sequence-level clipping: the ratio of a row is the geometric mean of its tokens' ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrft.algorithms.masking import at_least_float32, mask_out, masked_row_mean
from lightrft.algorithms.policy.clipped import check_clip_bounds
from lightrft.algorithms.ratios import LogRatio, log_ratio
from lightrft.algorithms.types import TokenLoss


def gspo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """Group sequence policy loss, the row's value repeated on each of its tokens.

    s_i = exp(mean_t(logprobs_it - old_it));  L_it = -min(s_i A_it, clip(s_i) A_it)

    The mean over a row, then over rows (seq-mean-token-mean) is the paper's objective. The bounds
    are about a thousand times smaller than PPO's, since s_i is a mean.

    Source: Zheng et al. 2025, arXiv:2507.18071.

    Args:
        logprobs, old_logprobs: [batch, seq]; gradients flow through `logprobs` only.
        advantages: [batch, seq], one number per row in the paper.
        response_mask: [batch, seq] bool.
        clip_low, clip_high: Half-widths of the interval of s_i below and above 1.

    Raises:
        ValueError: a negative clip bound.
    """
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    ratio = _row_ratio(delta, response_mask)
    return _clip(ratio, delta, advantages, response_mask, clip_low, clip_high)


def gspo_token_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """GSPO whose gradient acts token by token, so that advantages may differ within a row.

    s_it = sg[s_i] exp(logprobs_it - sg[logprobs_it]);  L_it = -min(s_it A_it, clip(s_it) A_it)

    Value equal to GSPO's; gradient equal too where the advantage is constant over the row.

    Source: Zheng et al. 2025, arXiv:2507.18071, the GSPO-token variant.

    Args:
        logprobs, old_logprobs, advantages: [batch, seq]; gradients flow through `logprobs` only.
        response_mask: [batch, seq] bool.
        clip_low, clip_high: Half-widths of the interval of s_i below and above 1.

    Raises:
        ValueError: a negative clip bound.
    """
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    inside = mask_out(at_least_float32(logprobs), response_mask)
    ratio = _row_ratio(delta, response_mask).detach() * (inside - inside.detach()).exp()
    return _clip(ratio, delta, advantages, response_mask, clip_low, clip_high)


def _row_ratio(delta: LogRatio, mask: Tensor) -> Tensor:
    """s_i repeated over the row: [batch, seq]."""
    return masked_row_mean(delta.values, mask).exp().unsqueeze(-1).expand_as(delta.values)


def _clip(
    ratio: Tensor,
    delta: LogRatio,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    check_clip_bounds(clip_low, clip_high)
    advantages = mask_out(at_least_float32(advantages.detach()), mask)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    held = ratio.detach()
    return TokenLoss(
        loss=mask_out(loss, mask),
        ratio=mask_out(held, mask),
        is_clipped_low=(advantages < 0) & (held < 1 - clip_low),
        is_clipped_high=(advantages > 0) & (held > 1 + clip_high),
        is_clamped=delta.is_clamped,
    )
