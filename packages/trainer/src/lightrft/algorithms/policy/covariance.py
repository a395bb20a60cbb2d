"""Policy losses that spare the tokens whose probability and advantage vary together.

Those tokens make the entropy fall: its change in a step is about minus the covariance of
log-probability and advantage. Over the response tokens of one call, without gradient:

    cov_t = (A_t - mean A) (logprobs_t - mean logprobs)

The means and the selection are those of the rows of one call, as in the authors' code: give all
rows of an optimizer batch at once for a step that does not depend on micro-batches.

Source: Cui et al. 2025, arXiv:2505.22617; the authors' code PRIME-RL/Entropy-Mechanism-of-RL.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lightrft.algorithms.interface import TokenLoss, policy_loss
from lightrft.algorithms.masking import log_ratio, mask_like, mask_out, masked_difference
from lightrft.algorithms.policy.clipped import clipped_policy_loss


@policy_loss(aggregation="token-mean", couples_rows=True)
def clip_cov_policy_loss(  # noqa: PLR0913 - the tensors of every loss and five hyper-parameters
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    cov_ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> TokenLoss:
    """PPO's surrogate without the gradient of a few tokens of high covariance.

    L_t = 0 for n = max(1, floor(cov_ratio N)) of the candidates cov_low < cov_t < cov_high that are
    not clipped, else -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    N counts the response tokens. The paper draws the n at random; here they are spread evenly over
    the candidates in the order of the tokens, so that a step can be repeated.

    Args:
        logprobs, old_logprobs, advantages: [batch, seq]; gradients flow through `logprobs` only.
        response_mask: [batch, seq] bool.
        clip_low, clip_high: Half-widths of the ratio's interval below and above 1.
        cov_ratio: Share of the response tokens to leave out, in [0, 1]; 0 leaves out none.
        cov_low, cov_high: Bounds of the candidates' covariance.

    Raises:
        ValueError: a bound or the share is out of range.
    """
    if not cov_low < cov_high:
        raise ValueError(f"cov_low must be below cov_high: got {cov_low} and {cov_high}")
    surrogate = clipped_policy_loss(
        logprobs, old_logprobs, advantages, response_mask, clip_low=clip_low, clip_high=clip_high
    )
    covariance = token_covariance(logprobs, advantages, response_mask)
    is_clipped = surrogate.is_clipped_low | surrogate.is_clipped_high
    is_candidate = response_mask & ~is_clipped & (covariance > cov_low) & (covariance < cov_high)
    candidates = is_candidate.flatten().nonzero().squeeze(-1)
    count = min(_selected(response_mask, cov_ratio), len(candidates))
    places = (2 * torch.arange(count, device=candidates.device) + 1) * len(candidates)
    is_left_out = torch.zeros_like(response_mask).flatten()
    is_left_out[candidates[places // (2 * max(count, 1))]] = True
    kept = ~is_left_out.view_as(response_mask)
    return replace(surrogate, loss=mask_out(surrogate.loss, kept))


@policy_loss(aggregation="token-mean", couples_rows=True)
def kl_cov_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cov_ratio: float = 2e-3,
    kl_coef: float = 1.0,
) -> TokenLoss:
    """Return the unclipped surrogate with a KL penalty on the tokens of highest covariance.

    L_t = -r_t A_t + kl_coef |logprobs_t - old_t| for the n = max(1, floor(cov_ratio N)) tokens of
    highest cov_t (the first of equals), else -r_t A_t

    N counts the response tokens. The penalty has no gradient where the policies are equal.

    Args:
        logprobs, old_logprobs, advantages: [batch, seq]; gradients flow through `logprobs` only.
        response_mask: [batch, seq] bool.
        cov_ratio: Share of the response tokens to hold back, in [0, 1]; 0 holds back none.
        kl_coef: Weight of the penalty.

    Raises:
        ValueError: the share or the weight is out of range.
    """
    if kl_coef < 0:
        raise ValueError(f"kl_coef must not be negative: got {kl_coef}")
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    advantages = mask_like(advantages, logprobs, response_mask)
    covariance = token_covariance(logprobs, advantages, response_mask)
    inside = torch.where(response_mask, covariance, -torch.inf).flatten()
    order = inside.argsort(descending=True, stable=True)
    is_held = torch.zeros_like(response_mask).flatten()
    is_held[order[: _selected(response_mask, cov_ratio)]] = True
    is_held = is_held.view_as(response_mask) & response_mask
    distance = masked_difference(logprobs, old_logprobs, response_mask).abs()
    weights = delta.values.exp()
    loss = -weights * advantages + kl_coef * mask_out(distance, is_held)
    return TokenLoss.unclipped(loss, weights, response_mask, delta.is_clamped)


@torch.no_grad()
def token_covariance(logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(A_t - mean A) (logprobs_t - mean logprobs) over the mask: [batch, seq] float64."""
    count = response_mask.sum().clamp(min=1)
    deviations = [
        values - values.sum() / count
        for values in (mask_out(each.double(), response_mask) for each in (logprobs, advantages))
    ]
    return mask_out(deviations[0] * deviations[1], response_mask)


def _selected(response_mask: Tensor, ratio: float) -> int:
    if not 0 <= ratio <= 1:
        raise ValueError(f"the share of selected tokens must lie in [0, 1]: got {ratio}")
    count = int(response_mask.sum())
    # Not below the product that was meant: 0.3 * 10 is 2.9999999999999996 for some shares.
    return 0 if ratio == 0 else min(max(1, int(ratio * count + 1e-9)), count)
