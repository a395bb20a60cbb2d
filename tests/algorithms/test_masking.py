"""Masked sums and means, with anything at all in the padding."""

import numpy as np
import torch

from lightrft.algorithms.masking import mask_out, masked_row_mean, masked_row_sum, row_lengths


def test_rows_equal_numpy_and_empty_rows_are_zero(ragged):
    batch = ragged(0)
    mask = batch.tensors.mask
    for filler in (float("nan"), float("inf"), -float("inf")):
        values = torch.where(mask, batch.tensors.values, filler)
        sums = [row[keep].sum() for row, keep in zip(batch.values, batch.mask, strict=True)]
        np.testing.assert_allclose(masked_row_sum(values, mask).numpy(), sums, atol=1e-12)
        means = [x / max(keep.sum(), 1) for x, keep in zip(sums, batch.mask, strict=True)]
        np.testing.assert_allclose(masked_row_mean(values, mask).numpy(), means, atol=1e-12)
    assert row_lengths(mask).tolist() == batch.mask.sum(1).tolist()
    assert sums[-1] == 0.0


def test_the_gradient_outside_the_mask_is_zero_not_nan():
    values = torch.tensor([[1.0, float("nan"), -float("inf")]], requires_grad=True)
    mask = torch.tensor([[True, False, False]])
    mask_out(values, mask).exp().sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([[1.0, 0.0, 0.0]]).exp() * mask)
