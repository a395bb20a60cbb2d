"""Losses of single tokens: the plain policy gradient, CISPO, SAPO and DRO."""

import torch
from torch import Tensor

from lightrft.algorithms.interface import TokenLoss, policy_loss
from lightrft.algorithms.masking import (
    LogRatio,
    at_least_float32,
    log_ratio,
    mask_like,
    mask_out,
    masked_difference,
)
from lightrft.algorithms.policy.clipped import check_clip_bounds


@policy_loss(aggregation="token-mean", is_token_wise=True)
def reinforce_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> TokenLoss:
    """Score-function policy loss, one value per token: L_t = -A_t logprobs_t.

    `old_logprobs` enters the reported ratio only. At logprobs = old_logprobs every other policy
    loss here has this gradient under its aggregation.

    Source: Williams 1992, Machine Learning 8.

    Args:
        logprobs, old_logprobs, advantages: [batch, seq]; gradients flow through `logprobs` only.
        response_mask: [batch, seq] bool.
    """
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    advantages = mask_like(advantages, logprobs, response_mask)
    inside = mask_out(at_least_float32(logprobs), response_mask)
    return TokenLoss.unclipped(
        -advantages * inside, delta.values.exp(), response_mask, delta.is_clamped
    )


@policy_loss(aggregation="token-mean", is_token_wise=True)
def cispo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> TokenLoss:
    """Clipped-importance-weight policy loss, one value per token.

    L_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t logprobs_t

    Every token keeps a gradient; the clip flags say where the weight was clipped.

    Source: MiniMax-M1 2025, arXiv:2506.13585. `clip_high` is added to 1 (some code bases take the
    cap itself); clip_low >= 1 means no lower bound, as in the paper.

    Args:
        logprobs, old_logprobs, advantages: [batch, seq]; gradients flow through `logprobs` only.
        response_mask: [batch, seq] bool.
        clip_low, clip_high: Half-widths of the weight's interval below and above 1.

    Raises:
        ValueError: a negative clip bound.
    """
    check_clip_bounds(clip_low, clip_high)
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    ratio = delta.values.detach().exp()
    advantages = mask_like(advantages, logprobs, response_mask)
    inside = mask_out(at_least_float32(logprobs), response_mask)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(
        loss=mask_out(-weight * advantages * inside, response_mask),
        ratio=mask_out(ratio, response_mask),
        is_clipped_low=response_mask & (ratio < 1 - clip_low),
        is_clipped_high=response_mask & (ratio > 1 + clip_high),
        is_clamped=delta.is_clamped,
    )


@policy_loss(aggregation="seq-mean-token-mean", is_token_wise=True)
def sapo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> TokenLoss:
    """Soft-gated policy loss, one value per token.

    L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t,  tau by the sign of A_t

    The gradient's weight is 1 at r = 1 and decays smoothly on both sides. Nothing is clipped, so
    the clip flags are False.

    Source: Gao et al. 2025, arXiv:2511.20347.

    Args:
        logprobs, old_logprobs, advantages: [batch, seq]; gradients flow through `logprobs` only.
        response_mask: [batch, seq] bool.
        temperature_positive, temperature_negative: tau where A > 0, and elsewhere.

    Raises:
        ValueError: a temperature is not positive.
    """
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    advantages = mask_like(advantages, logprobs, response_mask)
    temperatures = (temperature_positive, temperature_negative)
    return soft_gate(delta, advantages, response_mask, temperatures)


def soft_gate(
    delta: LogRatio, advantages: Tensor, response_mask: Tensor, temperatures: tuple[float, float]
) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (ratio - 1)) A.

    Args:
        delta: Log-ratio, with its gradient.
        advantages: [batch, seq], 0 outside the mask.
        response_mask: [batch, seq] bool.
        temperatures: tau where A > 0, and elsewhere.

    Raises:
        ValueError: a temperature is not positive.
    """
    positive, negative = temperatures
    if positive <= 0 or negative <= 0:
        raise ValueError(
            f"temperatures must be positive: got {positive} (positive) and {negative} (negative)"
        )
    ratio = delta.values.exp()
    tau = torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages
    return TokenLoss.unclipped(loss, ratio, response_mask, delta.is_clamped)


@policy_loss(aggregation="token-mean", is_token_wise=True)
def dro_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    penalty: float = 0.1,
) -> TokenLoss:
    """Policy gradient with a quadratic pull back to the old policy; no ratio, no clip.

    L_t = -p_t A_t + penalty / 2 (p_t - old_t)^2

    Source: Direct Reward Optimisation, Richemond et al. 2024, arXiv:2405.19107, with the advantage
    in place of reward and value, token by token as verl has it.

    Args:
        logprobs, old_logprobs, advantages: [batch, seq]; gradients flow through `logprobs` only.
        response_mask: [batch, seq] bool.
        penalty: Weight of the pull back.

    Raises:
        ValueError: the penalty is negative.
    """
    if penalty < 0:
        raise ValueError(f"penalty must not be negative: got {penalty}")
    difference = masked_difference(logprobs, old_logprobs, response_mask)
    advantages = mask_like(advantages, logprobs, response_mask)
    policy = mask_like(old_logprobs, logprobs, response_mask) + difference
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    loss = -policy * advantages + penalty / 2 * difference.square()
    return TokenLoss.unclipped(loss, delta.values.exp(), response_mask, delta.is_clamped)
