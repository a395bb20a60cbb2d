"""Log-probability differences that are safe to exponentiate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrft.algorithms.masking import at_least_float32, mask_out

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LogRatio:
    """A masked difference of logprobs.

    Args:
        values: [batch, seq], 0 outside the mask, within +-20; the gradient is 0 where clamped.
        is_clamped: [batch, seq] bool, True where the clamp changed the value.
    """

    values: Tensor
    is_clamped: Tensor


def log_ratio(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> LogRatio:
    """Logprobs - other_logprobs inside the mask, clamped to +-20.

    Args:
        logprobs: [batch, seq]; the gradient flows through it only.
        other_logprobs: [batch, seq].
        mask: [batch, seq] bool. The difference is masked before anyone can exponentiate it: a
            padded logprob of -inf would turn into NaN.
    """
    difference = masked_difference(logprobs, other_logprobs, mask)
    is_clamped = difference.detach().abs() > MAX_LOG_RATIO
    return LogRatio(difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), is_clamped)


def masked_difference(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Logprobs - other_logprobs, 0 outside the mask; gradient through `logprobs` only."""
    inside = mask_out(at_least_float32(logprobs), mask)
    return inside - mask_out(at_least_float32(other_logprobs.detach()), mask)
