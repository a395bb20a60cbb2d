"""Aggregation: independent means, splits into micro-batches and ranks, empty rows."""

import itertools

import numpy as np
import pytest
import torch

from lightrft.algorithms.aggregation import AGGREGATIONS, aggregate, local_normalizer, loss_weights


def _reference(loss, mask, mode, constant):
    rows = [loss[i][mask[i]] for i in range(len(loss)) if mask[i].any()]
    if mode == "token-mean":
        return float(np.concatenate(rows).mean())
    if mode == "seq-mean-token-mean":
        return float(np.mean([row.mean() for row in rows]))
    total = float(np.mean([row.sum() for row in rows]))
    return total / constant if mode == "seq-mean-token-sum-norm" else total


in_every_mode = pytest.mark.parametrize("mode", AGGREGATIONS)


@in_every_mode
def test_equals_independent_means_on_random_ragged_rows(mode, ragged):
    for seed in range(5):
        batch = ragged(seed)
        expected = _reference(batch.advantages, batch.mask, mode, 7)
        mask = batch.tensors.mask
        z = local_normalizer(mask, mode, max_response_tokens=7)
        value = aggregate(batch.tensors.advantages, mask, mode, z)
        assert value.item() == pytest.approx(expected, abs=1e-6)


@in_every_mode
def test_any_split_order_width_and_empty_row_gives_the_same_gradient(mode, ragged):
    batch = ragged(11, rows=6)
    mask = batch.tensors.mask

    def gradient(parts, pad):
        weights = torch.tensor(batch.advantages, requires_grad=True)
        loss = torch.nn.functional.pad(weights.square(), (0, pad), value=float("nan"))
        wide = torch.nn.functional.pad(mask, (0, pad))
        z = sum(local_normalizer(wide[p], mode, max_response_tokens=7) for p in parts)
        for part in parts:
            aggregate(loss[part], wide[part], mode, z).backward(retain_graph=True)
        assert weights.grad is not None
        return weights.grad

    whole = gradient([[0, 1, 2, 3, 4, 5]], 0)
    assert whole.abs().sum() > 0
    splits = [[[0, 1], [2, 3], [4, 5]], [[5], [3, 1, 0, 2], [4]], [[4, 2, 0], [1, 3, 5]]]
    for parts, pad in itertools.product(splits, (0, 3)):
        torch.testing.assert_close(gradient(parts, pad), whole, atol=1e-7, rtol=1e-6)


@in_every_mode
def test_no_token_anywhere_gives_zero_with_a_graph(mode):
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    z = local_normalizer(mask, mode, max_response_tokens=5)
    value = aggregate(loss, mask, mode, z)
    value.backward()
    assert value.item() == 0.0
    assert torch.equal(loss.grad, torch.zeros_like(loss))


def test_the_constant_mode_needs_its_constant():
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="max_response_tokens > 0"):
        local_normalizer(mask, "seq-mean-token-sum-norm")


def test_unknown_mode_lists_the_known_ones_and_the_nearest():
    with pytest.raises(ValueError, match=r"seq-mean-token-sum.*did you mean 'token-mean'"):
        loss_weights(torch.ones(1, 1, dtype=torch.bool), "tokenmean")


def test_float64_losses_are_not_weighed_in_float32():
    loss, mask = torch.ones(1, 3, dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    value = aggregate(loss, mask, "seq-mean-token-mean", 1.0)
    assert value.item() == pytest.approx(1.0, abs=1e-15)
    assert loss_weights(mask, "seq-mean-token-mean").dtype == torch.float32


def test_bfloat16_losses_are_summed_in_float32():
    loss = torch.full((1, 3000), 1.0, dtype=torch.bfloat16)
    mask = torch.ones(1, 3000, dtype=torch.bool)
    value = aggregate(loss, mask, "seq-mean-token-sum", 1.0)
    assert value.dtype == torch.float32
    assert value.item() == 3000.0
