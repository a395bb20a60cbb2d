"""Numbers that are not finite: how they are counted, and the error where nothing can go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class NumericsError(RuntimeError):
    """Numbers of a step cannot be trained on, or an alarm ended the run; the message says which."""


def num_nonfinite(values: Tensor | None, mask: Tensor) -> Tensor:
    """How many entries of `values` [batch, seq] are NaN or infinite where `mask` is true."""
    if values is None:
        return mask.new_zeros((), dtype=mask.dtype).long()
    return (mask & ~values.detach().isfinite()).sum()
