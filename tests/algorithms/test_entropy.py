"""High-entropy token masks."""

import numpy as np
import pytest
import torch

from lightrft.algorithms.masking import (
    entropy_threshold,
    high_entropy_mask,
    high_entropy_mask_per_sequence,
)

ENTROPY = torch.tensor([[0.1, 1.2, 0.3, 0.9], [0.7, 0.2, 99.0, float("nan")]]).double()
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()


def test_threshold_over_the_batch_worked_numbers():
    threshold = entropy_threshold(ENTROPY, MASK, ratio=1 / 3)
    assert threshold.item() == pytest.approx(0.766667, abs=1e-6)
    kept = high_entropy_mask(ENTROPY, MASK, threshold=threshold)
    assert kept.tolist() == [[False, True, False, True], [False] * 4]


def test_threshold_equals_the_quantile_of_numpy(ragged):
    batch = ragged(8, rows=20)
    for ratio in (0.05, 0.2, 0.5, 1.0):
        expected = np.quantile(batch.values[batch.mask], 1 - ratio)
        mask = batch.tensors.mask
        threshold = entropy_threshold(batch.tensors.values, mask, ratio=ratio)
        assert threshold.item() == pytest.approx(expected, abs=1e-12)
    everything = high_entropy_mask(batch.tensors.values, mask, threshold=threshold)
    assert torch.equal(everything, mask)


def test_per_sequence_mask_worked_numbers_and_counts(ragged):
    kept = high_entropy_mask_per_sequence(ENTROPY, MASK, ratio=1 / 3)
    assert kept.tolist() == [[False, True, False, False], [True, False, False, False]]
    batch = ragged(9, rows=12, width=20)
    mask = batch.tensors.mask
    kept = high_entropy_mask_per_sequence(batch.tensors.values, mask, ratio=0.3)
    for i, row in enumerate(batch.mask):
        expected = max(1, int(0.3 * row.sum() + 1e-9)) if row.any() else 0
        assert kept[i].sum() == expected
        if expected:
            lowest_kept = batch.values[i][kept[i].numpy()].min()
            left_out = batch.values[i][row & ~kept[i].numpy()]
            assert (left_out <= lowest_kept).all()


def test_padding_is_never_chosen_even_if_all_entropies_are_zero():
    kept = high_entropy_mask_per_sequence(torch.zeros(2, 4), MASK.flip(-1), ratio=0.5)
    assert not (kept & ~MASK.flip(-1)).any()
    assert kept.sum(-1).tolist() == [2, 1]
    constant = high_entropy_mask(torch.zeros(2, 4), MASK, threshold=0.0)
    assert torch.equal(constant, MASK)


def test_ratio_of_ten_tokens_is_not_hurt_by_rounding():
    entropy = torch.arange(10.0)[None]
    mask = torch.ones(1, 10, dtype=torch.bool)
    for ratio, number in ((0.1, 1), (0.2, 2), (0.3, 3), (0.7, 7), (1.0, 10)):
        assert high_entropy_mask_per_sequence(entropy, mask, ratio=ratio).sum() == number


def test_no_tokens_and_bad_ratios():
    assert entropy_threshold(ENTROPY, torch.zeros_like(MASK), ratio=0.2).item() == 0.0
    for ratio in (0.0, 1.1):
        with pytest.raises(ValueError, match="must lie in"):
            entropy_threshold(ENTROPY, MASK, ratio=ratio)
