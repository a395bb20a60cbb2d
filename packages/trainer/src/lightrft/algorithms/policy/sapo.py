"""Soft adaptive policy optimisation: a sigmoid gate in place of a hard clip."""

import torch
from torch import Tensor

from lightrft.algorithms.interface import TokenLoss, policy_loss
from lightrft.algorithms.masking import log_ratio, mask_like


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
    if temperature_positive <= 0 or temperature_negative <= 0:
        raise ValueError(
            "temperatures must be positive: got "
            f"{temperature_positive} (positive) and {temperature_negative} (negative)"
        )
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    ratio = delta.values.exp()
    advantages = mask_like(advantages, logprobs, response_mask)
    tau = torch.full_like(advantages, temperature_negative)
    tau = tau.masked_fill(advantages > 0, temperature_positive)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages
    return TokenLoss.unclipped(loss, ratio, response_mask, delta.is_clamped)
