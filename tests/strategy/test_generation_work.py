"""Seconds that few remaining responses cost, against engines of which they are known."""

import numpy as np
import pytest

from lightrft.strategy.engine.generation import GenerationWork, thin_seconds


def finishes_of(lengths, *, step_seconds, row_seconds):
    """When each row ends in an engine whose steps take a + b rows seconds, step by step."""
    now, found = 0.0, {}
    for position in range(1, max(lengths) + 1):
        active = sum(length >= position for length in lengths)
        now += step_seconds + row_seconds * active
        for row, length in enumerate(lengths):
            if length == position:
                found[row] = (now, length)
    return list(found.values()), now


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_that_only_waits_for_rows_loses_nothing(seed):
    lengths = np.random.default_rng(seed).integers(5, 200, 32).tolist()
    finishes, total = finishes_of(lengths, step_seconds=0.0, row_seconds=0.01)
    assert thin_seconds(finishes, total) == pytest.approx(0, abs=1e-9 * total)


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_that_reads_its_weights_at_each_step_loses_its_tail(seed):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(4.0, 0.8, 64).astype(int) + 1, 800).tolist()
    finishes, total = finishes_of(lengths, step_seconds=0.01, row_seconds=0.0)
    expected = total - sum(lengths) * 0.01 / len(lengths)
    assert thin_seconds(finishes, total) == pytest.approx(expected, rel=0.15)
    assert expected > 0.5 * total


def test_what_is_given_at_the_end_says_nothing_and_calls_add_up():
    assert thin_seconds([(2.0, 3), (2.0, 9)], 2.0) == 0.0
    assert thin_seconds([], 1.0) == 0.0
    work = GenerationWork()
    for _ in range(2):
        work.add([(1.0, 10), (4.0, 40)], 4.0)
    assert work.busy_seconds == 8.0
    assert work.thin_seconds == pytest.approx(2 * (4 - 50 / 20))
