"""Canaries of actors on this machine, and weight syncs that have to fail."""

from contextlib import contextmanager

import pytest
import torch

from lightrft.strategy.weight_sync.canary import actor_canary
from lightrft.strategy.weight_sync.verification import WeightSyncError


def canary_of(actor, wrapped=None, *, dtypes=(torch.float32,), max_length=None, **more):
    return actor_canary(
        wrapped or actor,
        actor,
        dtypes=dtypes,
        max_length=max_length,
        device=torch.device("cpu"),
        **more,
    )


@contextmanager
def failing(check, match=""):
    """Expect a sync to fail at one of its checks."""
    with pytest.raises(WeightSyncError, match=match) as caught:
        yield caught
    assert caught.value.check == check
