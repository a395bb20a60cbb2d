"""What policy losses return."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """One loss value per token, to be minimised, and what is worth counting.

    Everything is 0 or False outside the response mask; only `loss` carries a gradient.

    Args:
        loss: [batch, seq] float32 (float64 for float64 logprobs).
        ratio: [batch, seq] importance ratio to the old policy that the loss used: per token, or
            one number per row for sequence-level losses.
        is_clipped_low: [batch, seq] bool, the lower clip bound acted on the token.
        is_clipped_high: [batch, seq] bool, the upper one (the dual clip's included) did.
        is_clamped: [batch, seq] bool, |logprobs - old_logprobs| exceeded 20 and was held there.
    """

    loss: Tensor
    ratio: Tensor
    is_clipped_low: Tensor
    is_clipped_high: Tensor
    is_clamped: Tensor

    def weighted(self, weights: Tensor) -> TokenLoss:
        """The same loss times detached [batch, seq] weights: off-policy corrections, keep-masks.

        Only the numerator of the aggregation changes; Z still counts the response mask.
        """
        return replace(self, loss=self.loss * weights.detach().to(self.loss.dtype))
