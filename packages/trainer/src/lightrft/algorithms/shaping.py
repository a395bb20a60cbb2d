"""Changes to a reward before advantages are estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def overlong_penalty(
    lengths: Tensor, *, max_response_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> Tensor:
    """Soft punishment of long responses: [rows] float32, between -factor and 0.

    0 up to max - buffer tokens, then linear down to -factor at max_response_tokens and beyond.

    Source: DAPO, arXiv:2503.14476.

    Args:
        lengths: [rows], response tokens, the end token included.
        max_response_tokens: Response budget.
        buffer_tokens: Width of the slope.
        factor: Size of the full penalty.

    Raises:
        ValueError: not 0 < buffer_tokens <= max_response_tokens, or factor < 0.
    """
    if not 0 < buffer_tokens <= max_response_tokens or factor < 0:
        raise ValueError(
            "expected 0 < buffer_tokens <= max_response_tokens and factor >= 0: got "
            f"{buffer_tokens}, {max_response_tokens}, {factor}"
        )
    excess = (lengths - (max_response_tokens - buffer_tokens)).float() / buffer_tokens
    return -factor * excess.clamp(0.0, 1.0)


def clip_rewards(rewards: Tensor, *, limit: float) -> tuple[Tensor, Tensor]:
    """Rewards held within +-limit, and which were changed: [rows], [rows] bool.

    Raises:
        ValueError: limit is not positive.
    """
    if limit <= 0:
        raise ValueError(f"reward clip must be positive: got {limit}")
    return rewards.clamp(-limit, limit), rewards.abs() > limit


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Count, mean and variance of all rewards seen so far.

    Args:
        count: Rewards seen.
        mean: Their mean.
        sum_of_squares: Sum of squared deviations from the mean.
    """

    count: int = 0
    mean: float = 0.0
    sum_of_squares: float = 0.0

    def merge(self, rewards: Tensor) -> RunningMoments:
        """The moments after these rewards too: Chan's parallel update.

        Args:
            rewards: [rows] of all ranks, or the normaliser would differ from rank to rank.
        """
        count = rewards.numel()
        if count == 0:
            return self
        values = rewards.detach().double()
        mean = float(values.mean())
        squares = float((values - mean).square().sum())
        total = self.count + count
        delta = mean - self.mean
        return RunningMoments(
            count=total,
            mean=self.mean + delta * count / total,
            sum_of_squares=self.sum_of_squares + squares + delta**2 * self.count * count / total,
        )

    @property
    def std(self) -> float:
        """Standard deviation with count - 1; 1 before two different rewards were seen."""
        if self.count < 2 or self.sum_of_squares == 0.0:
            return 1.0
        return math.sqrt(self.sum_of_squares / (self.count - 1))

    def normalize(self, rewards: Tensor, *, minus_mean: bool = False) -> Tensor:
        """Rewards / std, or (rewards - mean) / std: [rows]."""
        centred = rewards.double() - self.mean if minus_mean else rewards.double()
        return (centred / self.std).to(rewards.dtype)
