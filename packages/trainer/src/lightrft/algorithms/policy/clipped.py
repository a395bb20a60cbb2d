"""The clipped surrogate of PPO; with clip_high > clip_low that of DAPO."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrft.algorithms.masking import at_least_float32, mask_out
from lightrft.algorithms.ratios import log_ratio
from lightrft.algorithms.types import TokenLoss


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Clipped surrogate policy loss, one value per token.

    L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),  r_t = exp(logprobs - old)
    with dual_clip c and A_t < 0:  L_t = min(L_t, -c A_t)

    Source: Schulman et al. 2017, arXiv:1707.06347; clip_high > clip_low is DAPO,
    arXiv:2503.14476; the dual clip is Ye et al. 2019, arXiv:1912.09729.

    Args:
        logprobs, old_logprobs, advantages: [batch, seq]; gradients flow through `logprobs` only.
        response_mask: [batch, seq] bool.
        clip_low, clip_high: Half-widths of the ratio's interval below and above 1.
        dual_clip: Cap of the ratio where the advantage is negative; None switches it off.

    Raises:
        ValueError: a negative clip bound, or dual_clip <= 1 + clip_high.
    """
    check_clip_bounds(clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1 + clip_high:
        raise ValueError(
            f"dual_clip must exceed 1 + clip_high = {1 + clip_high}, or it cuts into the trust "
            f"region: got {dual_clip}"
        )
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    ratio = delta.values.exp()
    advantages = mask_out(at_least_float32(advantages.detach()), response_mask)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    held = ratio.detach()
    is_clipped_high = (advantages > 0) & (held > 1 + clip_high)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
        is_clipped_high = is_clipped_high | ((advantages < 0) & (held > dual_clip))
    return TokenLoss(
        loss=mask_out(loss, response_mask),
        ratio=mask_out(held, response_mask),
        is_clipped_low=(advantages < 0) & (held < 1 - clip_low),
        is_clipped_high=is_clipped_high,
        is_clamped=delta.is_clamped,
    )


def check_clip_bounds(clip_low: float, clip_high: float) -> None:
    """Raise a ValueError if a clip bound is negative."""
    if clip_low < 0 or clip_high < 0:
        raise ValueError(
            f"clip bounds must not be negative: got clip_low={clip_low}, clip_high={clip_high}"
        )
