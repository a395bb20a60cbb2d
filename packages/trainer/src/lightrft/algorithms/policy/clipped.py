"""The clipped surrogate of PPO, with the bounds and aggregations of PPO, DAPO and Dr.GRPO."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lightrft.algorithms.interface import TokenLoss, policy_loss
from lightrft.algorithms.masking import LogRatio, log_ratio, mask_like, mask_out


@policy_loss(aggregation="seq-mean-token-mean", is_token_wise=True)
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

    Source: Schulman et al. 2017, arXiv:1707.06347, averaged over each row, then over rows, as GRPO
    does, arXiv:2402.03300; the dual clip is Ye et al. 2019, arXiv:1912.09729.

    Args:
        logprobs, old_logprobs, advantages: [batch, seq]; gradients flow through `logprobs` only.
        response_mask: [batch, seq] bool.
        clip_low, clip_high: Half-widths of the ratio's interval below and above 1.
        dual_clip: Cap of the ratio where the advantage is negative; None switches it off.

    Raises:
        ValueError: a negative clip bound, or dual_clip <= 1 + clip_high.
    """
    if dual_clip is not None and dual_clip <= 1 + clip_high:
        raise ValueError(
            f"dual_clip must exceed 1 + clip_high = {1 + clip_high}, or it cuts into the trust "
            f"region: got {dual_clip}"
        )
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    advantages = mask_like(advantages, logprobs, response_mask)
    surrogate = clipped_surrogate(
        delta,
        advantages,
        response_mask,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    if dual_clip is None:
        return surrogate
    bounded = torch.minimum(surrogate.loss, -dual_clip * advantages)
    is_bounded = (advantages < 0) & (surrogate.ratio > dual_clip)
    return replace(
        surrogate,
        loss=torch.where(advantages < 0, bounded, surrogate.loss),
        is_clipped_high=surrogate.is_clipped_high | is_bounded,
    )


# `clipped_policy_loss` with a higher upper bound, averaged over the tokens of the batch.
#
# Source: Yu et al. 2025, arXiv:2503.14476, sections 3.1 and 3.3.
dapo_policy_loss = policy_loss(aggregation="token-mean", is_token_wise=True)(
    partial(clipped_policy_loss, clip_high=0.28)
)

# `clipped_policy_loss`, summed over a row and divided by the response budget of the run.
#
# The divisor is the same for all rows, so that long wrong responses are not punished less.
#
# Source: Liu et al. 2025, arXiv:2503.20783.
dr_grpo_policy_loss = policy_loss(aggregation="seq-mean-token-sum-norm", is_token_wise=True)(
    partial(clipped_policy_loss)
)


def clipped_surrogate(
    delta: LogRatio,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-min(ratio A, clip(ratio) A) with its flags.

    Args:
        delta: Logarithms of the ratios, with their gradient.
        advantages: [batch, seq], 0 outside the mask.
        response_mask: [batch, seq] bool.
        clip_low, clip_high: Half-widths of the ratio's interval below and above 1.

    Raises:
        ValueError: a negative clip bound.
    """
    check_clip_bounds(clip_low, clip_high)
    ratio = delta.values.exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    held = ratio.detach()
    return TokenLoss(
        loss=mask_out(-torch.minimum(ratio * advantages, bounded * advantages), response_mask),
        ratio=mask_out(held, response_mask),
        is_clipped_low=(advantages < 0) & (held < 1 - clip_low),
        is_clipped_high=(advantages > 0) & (held > 1 + clip_high),
        is_clamped=delta.is_clamped,
    )


def check_clip_bounds(clip_low: float, clip_high: float) -> None:
    """Raise a ValueError if a clip bound is negative."""
    if clip_low < 0 or clip_high < 0:
        raise ValueError(
            f"clip bounds must not be negative: got clip_low={clip_low}, clip_high={clip_high}"
        )
