"""The critic's loss, and how much of the returns its values explain."""

import torch
from torch import Tensor

from lightrft.algorithms.masking import at_least_float32, mask_like, mask_out
from lightrft.algorithms.moments import PairedMoments


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    clip: float | None = 0.2,
) -> Tensor:
    """Clipped squared error, one value per token: [batch, seq].

    L_t = max((V - G)^2, (V_old + clamp(V - V_old, -clip, clip) - G)^2) / 2

    Source: Schulman et al. 2017, arXiv:1707.06347, as implemented by OpenAI baselines.

    Args:
        values: [batch, seq]; gradients flow through it only.
        old_values, returns: [batch, seq].
        response_mask: [batch, seq] bool.
        clip: Half-width of the interval around the old value; None switches it off.

    Raises:
        ValueError: clip is not positive, or the shapes differ.
    """
    if clip is not None and clip <= 0:
        raise ValueError(f"value clip must be positive, or None to switch it off: got {clip}")
    new = mask_out(at_least_float32(values), response_mask)
    old = mask_like(old_values, values, response_mask)
    target = mask_like(returns, values, response_mask)
    error = (new - target).square()
    if clip is not None:
        bounded = old + (new - old).clamp(-clip, clip)
        error = torch.maximum(error, (bounded - target).square())
    return mask_out(error / 2, response_mask)


def explained_variance(moments: PairedMoments) -> float | None:
    """1 - Var(returns - values) / Var(returns) of the moments of returns and of their errors.

    Blind to a constant offset of the values. None where the returns are constant, so that there
    is nothing to explain.
    """
    if moments.is_constant(0):
        return None
    return 1.0 - moments.squares[1] / moments.squares[0]
