"""Sums over the tokens of a response mask.

Values outside the mask may be anything, NaN and infinity included: they are replaced, never
multiplied by 0.
"""

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """`values` in float32, or unchanged if already float64."""
    return values if values.dtype == torch.float64 else values.float()


def mask_out(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 outside `mask`, whatever stood there; same shape."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def row_lengths(mask: Tensor) -> Tensor:
    """Number of tokens of every row of a [batch, seq] bool mask: [batch] int64."""
    return mask.sum(dim=-1)


def masked_row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens of every row; [batch]."""
    return mask_out(values, mask).sum(dim=-1)


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of every row; [batch], 0 for an empty row."""
    return masked_row_sum(values, mask) / row_lengths(mask).clamp(min=1)
