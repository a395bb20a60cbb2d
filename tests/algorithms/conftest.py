"""The worked example of the losses, and random ragged batches."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch


def _tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.fixture
def worked():
    """Two rows of 4 and 2 tokens in float64; padding holds values that must not matter."""
    nan, inf = float("nan"), float("inf")
    return SimpleNamespace(
        mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool(),
        old=_tensor([[-1.0, -0.5, -2.0, -0.7], [-0.9, -1.6, -inf, nan]]),
        new=_tensor([[-0.7, -0.6, -1.4, -1.3], [-1.5, -0.4, -inf, nan]]),
        ref=_tensor([[-0.9, -0.8, -1.0, -1.1], [-1.1, -0.9, nan, -inf]]),
        rollout=_tensor([[-1.1, -0.5, -1.0, -0.75], [-0.9, -2.9, -inf, nan]]),
        advantages=_tensor([[1.0] * 4, [-0.5, -0.5, nan, inf]]),
    )


@pytest.fixture
def ragged():
    """`ragged(seed, rows, width)`: random signed numpy arrays, holes in the mask, an empty row.

    `tensors` has the same.
    """

    def make(seed, *, rows=5, width=9):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, width + 1, size=rows)
        mask = np.arange(width)[None] < lengths[:, None]
        mask &= rng.random((rows, width)) > 0.2
        mask[0, 0] = True
        mask[-1] = False
        new = -rng.exponential(1.0, (rows, width))
        arrays = {
            "mask": mask,
            "new": new,
            "old": new + rng.normal(0, 0.3, (rows, width)),
            "ref": new + rng.normal(0, 0.5, (rows, width)),
            "rollout": new + rng.normal(0, 0.4, (rows, width)),
            "row_advantages": rng.normal(0, 1, rows),
            "advantages": rng.normal(0, 1, (rows, width)),
            "values": rng.normal(0, 1, (rows, width)),
            "rewards": rng.normal(0, 1, (rows, width)),
        }
        tensors = {name: torch.tensor(array) for name, array in arrays.items()}
        return SimpleNamespace(**arrays, tensors=SimpleNamespace(**tensors))

    return make
