"""Losses of whole rows: the ratio is the geometric mean of the ratios of their tokens."""

from dataclasses import replace

import torch
from torch import Tensor

from lightrft.algorithms.interface import TokenLoss, policy_loss
from lightrft.algorithms.masking import (
    at_least_float32,
    mask_like,
    mask_out,
    masked_difference,
    row_log_ratio,
)
from lightrft.algorithms.policy.clipped import clipped_surrogate
from lightrft.algorithms.policy.token_level import soft_gate


@policy_loss(aggregation="seq-mean-token-mean", is_sequence_level=True)
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
    are about a thousand times smaller than PPO's, since s_i is a mean. ln s_i is clamped to +-20.

    Source: Zheng et al. 2025, arXiv:2507.18071.

    Args:
        logprobs, old_logprobs: [batch, seq]; gradients flow through `logprobs` only.
        advantages: [batch, seq], one number per row in the paper.
        response_mask: [batch, seq] bool.
        clip_low, clip_high: Half-widths of the interval of s_i below and above 1.

    Raises:
        ValueError: a negative clip bound.
    """
    difference = masked_difference(logprobs, old_logprobs, response_mask)
    delta = row_log_ratio(difference, response_mask)
    return clipped_surrogate(
        delta,
        mask_like(advantages, logprobs, response_mask),
        response_mask,
        clip_low=clip_low,
        clip_high=clip_high,
    )


@policy_loss(aggregation="seq-mean-token-mean", is_sequence_level=True)
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
    difference = masked_difference(logprobs, old_logprobs, response_mask)
    delta = row_log_ratio(difference.detach(), response_mask)
    inside = mask_out(at_least_float32(logprobs), response_mask)
    # Like GSPO's, the gradient ends where ln s_i is held.
    straight_through = torch.where(delta.is_clamped, 0.0, inside - inside.detach())
    return clipped_surrogate(
        replace(delta, values=delta.values + straight_through),
        mask_like(advantages, logprobs, response_mask),
        response_mask,
        clip_low=clip_low,
        clip_high=clip_high,
    )


@policy_loss(aggregation="seq-mean-token-mean", is_sequence_level=True)
def gmpo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    max_log_ratio: float = 0.4,
    max_log_fall: float | None = None,
) -> TokenLoss:
    """Geometric-mean policy loss, the row's value repeated on each of its tokens.

    d_it = logprobs_it - old_it, bounded above by c where A > 0 and below by -c' where A < 0
    rho_i = exp(mean_t d_it);  L_it = -rho_i A_it

    A bounded token gets no gradient but still moves rho_i. The mean over a row, then over rows
    (seq-mean-token-mean) is the paper's objective. ln rho_i is clamped to +-20.

    Source: Zhao et al. 2025, arXiv:2507.20673.

    Args:
        logprobs, old_logprobs: [batch, seq]; gradients flow through `logprobs` only.
        advantages: [batch, seq], one number per row.
        response_mask: [batch, seq] bool.
        max_log_ratio: c; 0.4 keeps token ratios within e^-0.4 and e^0.4.
        max_log_fall: c', as verl has it; None is c.

    Raises:
        ValueError: a bound is not positive.
    """
    fall = max_log_ratio if max_log_fall is None else max_log_fall
    if max_log_ratio <= 0 or fall <= 0:
        raise ValueError(
            f"max_log_ratio and max_log_fall must be positive: got {max_log_ratio} and {fall}"
        )
    difference = masked_difference(logprobs, old_logprobs, response_mask)
    advantages = mask_like(advantages, logprobs, response_mask)
    bounded_above = torch.where(advantages > 0, difference.clamp(max=max_log_ratio), difference)
    bounded = torch.where(advantages < 0, difference.clamp(min=-fall), bounded_above)
    delta = row_log_ratio(bounded, response_mask)
    ratio = delta.values.exp()
    held = difference.detach()
    return TokenLoss(
        loss=mask_out(-ratio * advantages, response_mask),
        ratio=mask_out(ratio.detach(), response_mask),
        is_clipped_low=(advantages < 0) & (held < -fall),
        is_clipped_high=(advantages > 0) & (held > max_log_ratio),
        is_clamped=delta.is_clamped,
    )


@policy_loss(aggregation="seq-mean-token-mean", is_sequence_level=True)
def sequence_ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """PPO's clipped surrogate with a response as one action, repeated on each of its tokens.

    s_i = exp(sum_t(logprobs_it - old_it));  L_it = -min(s_i A_it, clip(s_i) A_it)

    The exact ratio of responses; its variance grows with their length. ln s_i is clamped to +-20.

    Source: Ahmadian et al. 2024, arXiv:2402.14740 (the advantage there is `rloo`), as in TRL.

    Args:
        logprobs, old_logprobs: [batch, seq]; gradients flow through `logprobs` only.
        advantages: [batch, seq], one number per row in the paper.
        response_mask: [batch, seq] bool.
        clip_low, clip_high: Half-widths of the interval of s_i below and above 1.

    Raises:
        ValueError: a negative clip bound.
    """
    difference = masked_difference(logprobs, old_logprobs, response_mask)
    delta = row_log_ratio(difference, response_mask, is_product=True)
    return clipped_surrogate(
        delta,
        mask_like(advantages, logprobs, response_mask),
        response_mask,
        clip_low=clip_low,
        clip_high=clip_high,
    )


@policy_loss(aggregation="seq-mean-token-mean", is_sequence_level=True)
def sequence_sapo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> TokenLoss:
    """SAPO's gate on GSPO's ratio, the row's value repeated on each of its tokens.

    s_i = exp(mean_t(logprobs_it - old_it));  L_it = -(4 / tau) sigmoid(tau (s_i - 1)) A_it

    Source: Gao et al. 2025, arXiv:2511.20347, with the ratio of arXiv:2507.18071, as in AReaL.

    Args:
        logprobs, old_logprobs: [batch, seq]; gradients flow through `logprobs` only.
        advantages: [batch, seq], one number per row.
        response_mask: [batch, seq] bool.
        temperature_positive, temperature_negative: tau where A > 0, and elsewhere.

    Raises:
        ValueError: a temperature is not positive.
    """
    difference = masked_difference(logprobs, old_logprobs, response_mask)
    delta = row_log_ratio(difference, response_mask)
    advantages = mask_like(advantages, logprobs, response_mask)
    temperatures = (temperature_positive, temperature_negative)
    return soft_gate(delta, advantages, response_mask, temperatures)
