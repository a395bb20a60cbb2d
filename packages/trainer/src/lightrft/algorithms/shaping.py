"""Changes to a reward before advantages are estimated."""

from __future__ import annotations

from torch import Tensor

from lightrft.algorithms.moments import Moments


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


def normalize_rewards(rewards: Tensor, moments: Moments, *, minus_mean: bool = False) -> Tensor:
    """Rewards / std, or (rewards - mean) / std: [rows].

    Args:
        rewards: [rows].
        moments: Of all rewards so far and of all ranks, or the result would differ between ranks.
            The standard deviation divides by count - 1 and is 1 where all rewards were equal.
        minus_mean: Subtract the mean, too.
    """
    centred = rewards.double() - moments.mean if minus_mean else rewards.double()
    return (centred / moments.std(ddof=1)).to(rewards.dtype)
