"""Weights that correct for the difference between the sampling engine and the trainer.

w_t = exp(old_logprobs_t - rollout_logprobs_t). The weights are detached, multiply the numerator of
the aggregation only, and leave the response mask alone: a rejected token has weight 0 and is
still counted. The exponent is clamped to +-20; `raw` is the weight before any cap or rejection.

    name           weight
    tis            min(w_t, high)
    icepop         w_t if low <= w_t <= high, else 0
    tis-sequence   min(w_seq, high), w_seq the product over the row
    mis            w_seq if low <= w_seq <= high, else 0 for the whole row
    tis-geometric  min(w_geo, high), w_geo the geometric mean over the row
    geometric      w_t if low <= w_geo <= high, else 0 for the whole row

Source: decoupled PPO, arXiv:2110.00641; IcePop, arXiv:2510.18855.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrft.algorithms.lookup import lookup
from lightrft.algorithms.masking import (
    mask_out,
    masked_row_mean,
    masked_row_sum,
)
from lightrft.algorithms.ratios import MAX_LOG_RATIO, masked_difference

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class CorrectionWeights:
    """What to multiply the token loss with.

    Args:
        weights: [batch, seq], 0 outside the response mask and where rejected.
        raw: [batch, seq] token weights w_t before caps and rejection.
        is_capped: [batch, seq] bool, the weight was lowered to the upper bound.
        is_rejected: [batch, seq] bool, the weight was set to 0.
    """

    weights: Tensor
    raw: Tensor
    is_capped: Tensor
    is_rejected: Tensor


@dataclass(frozen=True, slots=True)
class Correction:
    """One named correction.

    Args:
        tested: What is compared with the bounds: token, product or geometric mean of the row.
        applied: What multiplies the loss.
        rejects: Outside the bounds the weight becomes 0; otherwise it is capped.
        low, high: Default bounds.
    """

    tested: str
    applied: str
    rejects: bool
    low: float
    high: float


CORRECTIONS: dict[str, Correction] = {
    "tis": Correction("token", "token", rejects=False, low=0.0, high=2.0),
    "icepop": Correction("token", "token", rejects=True, low=0.5, high=5.0),
    "tis-sequence": Correction("product", "product", rejects=False, low=0.0, high=2.0),
    "mis": Correction("product", "product", rejects=True, low=0.0, high=3.0),
    "tis-geometric": Correction("geometric", "geometric", rejects=False, low=0.0, high=2.0),
    "geometric": Correction("geometric", "token", rejects=True, low=0.999, high=1.002),
}


def _rows(values: Tensor, like: Tensor) -> Tensor:
    return values.unsqueeze(-1).expand_as(like)


_LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda difference, mask: mask_out(difference, mask),
    "product": lambda difference, mask: _rows(masked_row_sum(difference, mask), difference),
    "geometric": lambda difference, mask: _rows(masked_row_mean(difference, mask), difference),
}


@torch.no_grad()
def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    mode: str,
    low: float | None = None,
    high: float | None = None,
) -> CorrectionWeights:
    """Off-policy correction weights of every response token.

    Args:
        old_logprobs: [batch, seq] of the trainer, before the update.
        rollout_logprobs: [batch, seq] of the engine, under the same law.
        response_mask: [batch, seq] bool.
        mode: A name in `CORRECTIONS`.
        low, high: Bounds of what the mode tests; None means the mode's own.

    Raises:
        ValueError: unknown mode, or not 0 <= low < high.
    """
    correction = lookup(CORRECTIONS, mode, kind="off-policy correction")
    low = correction.low if low is None else low
    high = correction.high if high is None else high
    if not 0 <= low < high:
        raise ValueError(f"correction {mode!r} needs 0 <= low < high: got {low} and {high}")
    if not correction.rejects and low > 0:
        raise ValueError(f"correction {mode!r} caps from above only: low must be 0, got {low}")
    difference = masked_difference(old_logprobs, rollout_logprobs, response_mask)
    tested = _weight(difference, response_mask, correction.tested)
    applied = _weight(difference, response_mask, correction.applied)
    never = torch.zeros_like(response_mask)
    if correction.rejects:
        is_rejected = response_mask & ((tested < low) | (tested > high))
        weights, is_capped = torch.where(is_rejected, 0.0, applied), never
    else:
        is_rejected, is_capped = never, response_mask & (applied > high)
        weights = applied.clamp(max=high)
    return CorrectionWeights(
        weights=mask_out(weights, response_mask),
        raw=mask_out(_weight(difference, response_mask, "token"), response_mask),
        is_capped=is_capped,
        is_rejected=is_rejected,
    )


def _weight(difference: Tensor, mask: Tensor, level: str) -> Tensor:
    return _LEVELS[level](difference, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@torch.no_grad()
def off_policy_sequence_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    max_divergence: float,
) -> Tensor:
    """Tokens to keep: rows with a negative advantage that drifted too far are dropped.

    A row is dropped if its mean advantage < 0 and mean_t(rollout - logprobs) > max_divergence.

    Source: DeepSeek-V3.2, arXiv:2512.02556.

    Returns:
        [batch, seq] bool, within the response mask.
    """
    drift = masked_row_mean(
        masked_difference(rollout_logprobs, logprobs, response_mask), response_mask
    )
    is_negative = masked_row_mean(advantages, response_mask) < 0
    return response_mask & ~(is_negative & (drift > max_divergence)).unsqueeze(-1)
