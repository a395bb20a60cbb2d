"""The plain policy gradient."""

from torch import Tensor

from lightrft.algorithms.interface import TokenLoss, policy_loss
from lightrft.algorithms.masking import at_least_float32, log_ratio, mask_like, mask_out


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
