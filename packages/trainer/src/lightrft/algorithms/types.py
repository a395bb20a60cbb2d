"""What policy losses and advantage estimators take and return."""

from __future__ import annotations

from collections.abc import Callable
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
        is_clamped: [batch, seq] bool, the log of `ratio` exceeded 20 in size and was held there.
    """

    loss: Tensor
    ratio: Tensor
    is_clipped_low: Tensor
    is_clipped_high: Tensor
    is_clamped: Tensor

    @classmethod
    def unclipped(
        cls, loss: Tensor, ratio: Tensor, response_mask: Tensor, is_clamped: Tensor | None = None
    ) -> TokenLoss:
        """A loss without clipping; `loss` and `ratio` count inside the mask only."""
        never = response_mask & ~response_mask
        ratio = ratio.detach().masked_fill(~response_mask, 0.0)
        loss = loss.masked_fill(~response_mask, 0.0)
        return cls(loss, ratio, never, never, never if is_clamped is None else is_clamped)

    def weighted(self, weights: Tensor) -> TokenLoss:
        """The same loss times detached [batch, seq] weights: off-policy corrections, keep-masks.

        Only the numerator of the aggregation changes; Z still counts the response mask.
        """
        return replace(self, loss=self.loss * weights.detach().to(self.loss.dtype))


@dataclass(frozen=True, slots=True)
class RowAdvantageInputs:
    """The rows of one step over all ranks, the same on every rank.

    Args:
        rewards: [rows].
        group_ids: [rows] int64; rows of one prompt share it. Any order.
        lengths: [rows] int64, sampled tokens.
        greedy_rewards: [rows] reward of the greedy completion of the row's prompt; ReMax only.
        is_scored: [rows] bool, False where the reward is missing: such a row gets 0 and its group
            does without it. None: all are scored.
    """

    rewards: Tensor
    group_ids: Tensor
    lengths: Tensor
    greedy_rewards: Tensor | None = None
    is_scored: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenAdvantageInputs:
    """Rows of one rank.

    Args:
        token_rewards: [batch, seq], see `returns.token_rewards`.
        response_mask: [batch, seq] bool.
        values: [batch, seq] of the critic, or None without one.
        gamma: Discount per sampled token; a tensor [batch, seq] holds that between each token and
            the next sampled one.
        lambd: Of generalised advantage estimation.
    """

    token_rewards: Tensor
    response_mask: Tensor
    values: Tensor | None = None
    gamma: float | Tensor = 1.0
    lambd: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Advantages before whitening, and the returns a critic learns.

    Args:
        advantages: [batch, seq], 0 outside the response mask.
        returns: [batch, seq], 0 outside the response mask.
    """

    advantages: Tensor
    returns: Tensor


# (logprobs, old_logprobs, advantages, response_mask), each [batch, seq]; options are bound.
PolicyLossFunction = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], TokenLoss]

# RowAdvantageInputs -> [rows] or TokenAdvantageInputs -> TokenAdvantages; options are bound.
AdvantageFunction = Callable[..., "Tensor | TokenAdvantages"]
