"""CPGD: the policy gradient, clipped on the log-ratio, with a pull back to the old policy."""

import math

import torch
from torch import Tensor

from lightrft.algorithms.interface import TokenLoss, policy_loss
from lightrft.algorithms.masking import log_ratio, mask_like, mask_out, masked_difference


@policy_loss(aggregation="seq-mean-token-mean", is_token_wise=True)
def cpgd_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    drift_coef: float = 0.001,
    drift_cap: float = 2.0,
) -> TokenLoss:
    """Clipped policy gradient on the log-ratio, plus a pull back to the old policy.

    c_t = min(p_t, old_t + ln(1 + clip_high)) if A_t > 0, else max(p_t, old_t + ln(1 - clip_low))
    L_t = -c_t A_t + drift_coef * min(sg[r_t] - 1, drift_cap) p_t,  r_t = exp(p_t - old_t)

    The drift term has the gradient of KL(old || policy), capped. The value is not centred: it
    moves with the logprobs themselves.

    Source: Liu et al. 2025, arXiv:2505.12504.

    Args:
        logprobs, old_logprobs, advantages: [batch, seq]; gradients flow through `logprobs` only.
        response_mask: [batch, seq] bool.
        clip_low, clip_high: Half-widths of the ratio's interval below and above 1.
        drift_coef: Weight of the drift term; 0 switches it off.
        drift_cap: Upper bound of r - 1 in the drift term.

    Raises:
        ValueError: clip_low outside [0, 1), or another number negative.
    """
    if not 0 <= clip_low < 1 or min(clip_high, drift_coef, drift_cap) < 0:
        raise ValueError(
            "expected 0 <= clip_low < 1 and clip_high, drift_coef, drift_cap >= 0: got "
            f"{clip_low}, {clip_high}, {drift_coef}, {drift_cap}"
        )
    old = mask_like(old_logprobs, logprobs, response_mask)
    # The unclamped difference: nothing is exponentiated here, and a token far below the old
    # policy must keep its gradient.
    difference = masked_difference(logprobs, old_logprobs, response_mask)
    advantages = mask_like(advantages, logprobs, response_mask)
    low, high = math.log1p(-clip_low), math.log1p(clip_high)
    bounded = torch.where(advantages > 0, difference.clamp(max=high), difference.clamp(min=low))
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    ratio = delta.values.detach().exp()
    policy = old + difference
    loss = -(old + bounded) * advantages + drift_coef * (ratio - 1).clamp(max=drift_cap) * policy
    return TokenLoss(
        loss=mask_out(loss, response_mask),
        ratio=mask_out(ratio, response_mask),
        is_clipped_low=(advantages < 0) & (difference.detach() < low),
        is_clipped_high=(advantages > 0) & (difference.detach() > high),
        is_clamped=delta.is_clamped,
    )
