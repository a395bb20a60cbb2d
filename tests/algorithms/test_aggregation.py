"""Aggregation: worked numbers, splits into micro-batches and ranks, empty rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lightrft.algorithms.aggregation import AGGREGATIONS, aggregate, local_normalizer, loss_weights

CONSTANT = 4
FULL_VALUES = {  # losses [1,2,3,4], [2,0], [6] and one empty row
    "token-mean": 2.571429,
    "seq-mean-token-sum": 6.0,
    "seq-mean-token-mean": 3.166667,
    "seq-mean-token-sum-norm": 1.5,
}
SHARES = {  # of the four micro-batches, before the factor ranks * accumulation = 4
    "token-mean": [5.714286, 1.142857, 3.428571, 0.0],
    "seq-mean-token-sum": [13.333333, 2.666667, 8.0, 0.0],
    "seq-mean-token-mean": [3.333333, 1.333333, 8.0, 0.0],
    "seq-mean-token-sum-norm": [3.333333, 0.666667, 2.0, 0.0],
}


def _fixture() -> tuple[torch.Tensor, torch.Tensor]:
    loss = torch.tensor([[1.0, 2, 3, 4], [2, 0, 9, 9], [6, 9, 9, 9], [9, 9, 9, 9]]).double()
    lengths = torch.tensor([4, 2, 1, 0])
    return loss, torch.arange(4)[None] < lengths[:, None]


def _reference(loss: np.ndarray, mask: np.ndarray, mode: str, constant: int) -> float:
    rows = [loss[i][mask[i]] for i in range(len(loss)) if mask[i].any()]
    if mode == "token-mean":
        return float(np.concatenate(rows).mean())
    if mode == "seq-mean-token-mean":
        return float(np.mean([row.mean() for row in rows]))
    total = float(np.mean([row.sum() for row in rows]))
    return total / constant if mode == "seq-mean-token-sum-norm" else total


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_value_and_shares_of_the_worked_example(mode: str) -> None:
    loss, mask = _fixture()
    z = local_normalizer(mask, mode, max_response_tokens=CONSTANT)
    assert aggregate(loss, mask, mode, z).item() == pytest.approx(FULL_VALUES[mode], abs=1e-6)
    shares = [4 * aggregate(loss[i : i + 1], mask[i : i + 1], mode, z).item() for i in range(4)]
    assert shares == pytest.approx(SHARES[mode], abs=1e-5)
    assert sum(shares) / 4 == pytest.approx(FULL_VALUES[mode], abs=1e-6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_equals_independent_means_on_random_ragged_rows(mode: str, ragged) -> None:
    for seed in range(5):
        batch = ragged(seed)
        expected = _reference(batch.advantages, batch.mask, mode, 7)
        mask = torch.tensor(batch.mask)
        z = local_normalizer(mask, mode, max_response_tokens=7)
        value = aggregate(torch.tensor(batch.advantages), mask, mode, z)
        assert value.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_any_split_order_width_and_empty_row_gives_the_same_gradient(mode: str, ragged) -> None:
    batch = ragged(11, rows=6)
    mask = torch.tensor(batch.mask)

    def gradient(parts: list[list[int]], pad: int) -> torch.Tensor:
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


def test_mean_of_local_means_is_another_number() -> None:
    loss, mask = _fixture()
    local = [loss[i][mask[i]].mean().item() if mask[i].any() else 0.0 for i in range(4)]
    assert sum(local) / 4 == pytest.approx(2.375)
    assert abs(sum(local) / 4 - FULL_VALUES["token-mean"]) > 0.1


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_no_token_anywhere_gives_zero_with_a_graph(mode: str) -> None:
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    z = local_normalizer(mask, mode, max_response_tokens=5)
    value = aggregate(loss, mask, mode, z)
    value.backward()
    assert value.item() == 0.0
    assert torch.equal(loss.grad, torch.zeros_like(loss))


def test_weights_of_short_and_long_rows() -> None:
    mask = torch.arange(8)[None] < torch.tensor([[2], [8]])
    expected = {
        "token-mean": (0.1, 0.1),
        "seq-mean-token-mean": (0.25, 0.0625),
        "seq-mean-token-sum": (0.5, 0.5),
        "seq-mean-token-sum-norm": (0.0625, 0.0625),
    }
    for mode, (short, long) in expected.items():
        weights = loss_weights(mask, mode) / local_normalizer(mask, mode, max_response_tokens=8)
        assert weights[0, :2].tolist() == pytest.approx([short] * 2)
        assert weights[1].tolist() == pytest.approx([long] * 8)
        assert weights[0, 2:].abs().sum() == 0


def test_the_constant_mode_needs_its_constant() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="max_response_tokens > 0"):
        local_normalizer(mask, "seq-mean-token-sum-norm")


def test_unknown_mode_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"seq-mean-token-sum.*did you mean 'token-mean'"):
        loss_weights(torch.ones(1, 1, dtype=torch.bool), "tokenmean")


def test_float64_losses_are_not_weighed_in_float32() -> None:
    loss, mask = torch.ones(1, 3, dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    value = aggregate(loss, mask, "seq-mean-token-mean", 1.0)
    assert value.item() == pytest.approx(1.0, abs=1e-15)
    assert loss_weights(mask, "seq-mean-token-mean").dtype == torch.float32


def test_bfloat16_losses_are_summed_in_float32() -> None:
    loss = torch.full((1, 3000), 1.0, dtype=torch.bfloat16)
    mask = torch.ones(1, 3000, dtype=torch.bool)
    value = aggregate(loss, mask, "seq-mean-token-sum", 1.0)
    assert value.dtype == torch.float32
    assert value.item() == 3000.0
