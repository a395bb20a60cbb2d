"""Sums over the tokens of a response mask.

Values outside the mask may be anything, NaN and infinity included: they are replaced, never
multiplied by 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MIN_VARIANCE = 1e-8  # of whitened advantages; a constant batch must not be blown up


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


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, sum and sum of squares of some numbers; additive over ranks.

    Args:
        sums: [3] float64: count, sum, sum of squares. All-reduce it by summation, then build a
            new `Moments` of the result.
    """

    sums: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean; 0 of no numbers."""
        return self.sums[1] / self.sums[0].clamp(min=1)

    def std(self, *, ddof: int = 0) -> Tensor:
        """Standard deviation, at least sqrt(1e-8); 1 where fewer than 1 + ddof numbers exist."""
        count = self.sums[0]
        centred = self.sums[2] - count * self.mean.square()
        variance = centred / (count - ddof).clamp(min=1)
        std = variance.clamp(min=MIN_VARIANCE).sqrt()
        return torch.where(count > ddof, std, torch.ones_like(std))


def masked_moments(values: Tensor, mask: Tensor) -> Moments:
    """Moments of the values inside the mask, in float64."""
    inside = mask_out(values.detach().double(), mask)
    count = mask.sum().double()
    return Moments(torch.stack([count, inside.sum(), inside.square().sum()]))


def whiten(values: Tensor, mask: Tensor, mean: Tensor | float, std: Tensor | float) -> Tensor:
    """(values - mean) / std inside the mask, 0 outside.

    Args:
        values: [batch, seq].
        mean, std: moments of the whole optimizer batch over all ranks, not of these rows: a
            result that depends on the split into micro-batches or ranks would be wrong.
    """
    scaled = (values.double() - mean) / std
    return mask_out(scaled, mask).to(values.dtype)
