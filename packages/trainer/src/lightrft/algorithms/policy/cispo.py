"""Clipped importance weights on a policy gradient that drops no token."""

from torch import Tensor

from lightrft.algorithms.interface import TokenLoss, policy_loss
from lightrft.algorithms.masking import at_least_float32, log_ratio, mask_like, mask_out
from lightrft.algorithms.policy.clipped import check_clip_bounds


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

    Every token keeps a gradient; the clip flags say where the weight was held.

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
