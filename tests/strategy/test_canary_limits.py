"""The canary decides by the mean: one unlikely token in bfloat16 is no fault, a shift of all is."""

import math

import pytest
import torch

from lightrft.strategy.weight_sync.canary import CANARY_LIMITS, Canary
from lightrft.strategy.weight_sync.verification import WeightSyncError

EXPECTED = [0.0] + [-9.0] * 63


def canary(dtype):
    return Canary(tuple(range(64)), lambda ids: [0.0] * len(ids), CANARY_LIMITS[dtype])


def test_one_unlikely_token_far_off_passes_in_bfloat16():
    answer = [*EXPECTED[:-1], EXPECTED[-1] + 1.0]
    assert canary(torch.bfloat16).check(EXPECTED, answer) == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", list(CANARY_LIMITS))
def test_a_shift_of_all_tokens_a_large_one_and_nan_are_found(dtype):
    limits = CANARY_LIMITS[dtype]
    for answer in (
        [value + 1.5 * limits.mean for value in EXPECTED],
        [*EXPECTED[:-1], EXPECTED[-1] + 1.5 * limits.largest],
        [*EXPECTED[:-1], math.nan],
    ):
        with pytest.raises(WeightSyncError, match="canary prompt differently"):
            canary(dtype).check(EXPECTED, answer)
