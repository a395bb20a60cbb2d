"""pass@k against counting all subsets, and what an evaluation makes of a table."""

from itertools import combinations
from math import comb

import numpy as np
import pytest

from lightrft.tools.evaluation.evaluation_run import EvalSettings, default_k, pass_at_k


def share_of_subsets_with_a_right_one(num_correct, num_samples, k):
    samples = [index < num_correct for index in range(num_samples)]
    subsets = list(combinations(samples, k))
    return sum(map(any, subsets)) / len(subsets)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_the_estimate_is_the_share_of_subsets_with_a_right_sample(num_samples):
    counts = np.arange(num_samples + 1)
    for k in range(1, num_samples + 1):
        expected = [share_of_subsets_with_a_right_one(int(c), num_samples, k) for c in counts]
        found = pass_at_k(counts, num_samples=num_samples, k=k)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


def test_large_numbers_stay_exact():
    n, k = 1000, 100
    counts = np.array([0, 1, 3, 900, 901, 1000])
    expected = [float(1 - comb(n - c, k) / comb(n, k)) for c in counts.tolist()]
    np.testing.assert_allclose(pass_at_k(counts, num_samples=n, k=k), expected, rtol=1e-12)


def test_powers_of_two_and_the_number_of_samples_are_the_usual_k():
    assert [default_k(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


@pytest.mark.parametrize("values", [{"pass_k": (1,)}, {"num_samples": 4, "pass_k": (1, 5)}])
def test_a_k_out_of_range_is_named(values):
    (problem,) = EvalSettings(**values).problems()
    assert problem.startswith("pass_k: got")
    assert EvalSettings(num_samples=4, pass_k=(1, 4)).problems() == []
