import math

import pytest
import torch

from lightrft.stages.metrics import StepMetrics


class Ranks:
    """Plays all ranks: the local vectors of the others are given."""

    def __init__(self, others=()):
        self.others = others

    def all_gather(self, data):
        return torch.cat([data, *self.others])


def local_vector(metrics):
    captured = []

    class Spy:
        def all_gather(self, data):
            captured.append(data)
            return data

    metrics.reduce(Spy())
    return captured[0]


def test_a_masked_mean_weighs_tokens_of_all_micro_batches_and_ranks_equally():
    generator = torch.Generator().manual_seed(0)
    ranks, total, count = [], 0.0, 0
    for _ in range(3):
        metrics = StepMetrics()
        for rows in (1, 3):
            values = torch.randn(rows, 7, generator=generator)
            mask = torch.rand(rows, 7, generator=generator) > 0.6
            metrics.add_masked_mean("x", values, mask)
            total += float(values[mask].double().sum())
            count += int(mask.sum())
        ranks.append(metrics)
    others = [local_vector(m) for m in ranks[1:]]
    reduced = ranks[0].reduce(Ranks(others))
    assert reduced["x"] == pytest.approx(total / count, rel=1e-12)


def test_values_outside_the_mask_do_not_count_whatever_they_are():
    metrics = StepMetrics()
    metrics.add_masked_mean("x", torch.tensor([[1.0, math.nan]]), torch.tensor([[True, False]]))
    assert metrics.reduce(Ranks()) == {"x": 1.0}


def test_a_maximum_is_that_of_all_ranks_and_no_value_is_no_metric():
    first, second = StepMetrics(), StepMetrics()
    first.add_max("m", torch.tensor(2.0))
    first.add_max("m", 1.0)
    second.add_max("m", -math.inf)
    assert first.reduce(Ranks([local_vector(second)])) == {"m": 2.0}
    assert second.reduce(Ranks()) == {}


def test_a_mean_over_nothing_is_left_out():
    metrics = StepMetrics()
    metrics.add_mean("empty", 0.0, 0)
    metrics.add_mean("full", 3.0, 2)
    assert metrics.reduce(Ranks()) == {"full": 1.5}


def test_infinity_in_a_mean_is_shown():
    metrics = StepMetrics()
    metrics.add_mean("x", math.inf, 2)
    assert metrics.reduce(Ranks())["x"] == math.inf
