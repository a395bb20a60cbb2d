"""Changes to a reward before advantages are estimated."""

from torch import Tensor

from lightrft.algorithms.moments import Moments


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
