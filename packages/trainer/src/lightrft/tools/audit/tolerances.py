"""Largest allowed differences between a run's values and recomputed ones; fixed before any run.

A run computes in float32 or bfloat16, and sums in another order; an audit computes in float64.
Counts, ids and masks must be equal. All other numbers have one of these kinds:

    kind          compared quantity                                   relative to
    logprobs      largest distance of a token (mean distance: / 20)   1, or the value if larger
    engine        the same, between engine and trainer                1, or the value if larger
    replayed      the same, after updates (mean distance: / 5)        1, or the value if larger
    advantages    largest distance of a token                         largest advantage
    weights       largest distance of a token                         1, or the weight if larger
    loss          distance                                            sum of the sizes of its terms
    norm          distance                                            the norm
    sgd, adam     2-norm of the difference of two changes             2-norm of the change, plus the
                                                                      rounding of the weights
    moments       2-norm of the difference                            2-norm
    number        distance                                            the number

A relative limit is useless for a value of 0. Where something differs by more than its limit, the
step is computed again, a few times, from inputs that are moved by their rounding; what that changes
of a quantity is added to its limit. These inputs are moved:

    input                                 its rounding
    logprobs, entropies, values           "score", relative to 1, or to the value if larger
    rewards, advantages                   "sum", relative to the sizes of the summed terms
    gradients                             2e-6 of the largest entry; an entry of 0 has none
    weights after an update               that of a float32 number
"""

from collections.abc import Mapping

TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "float32": {
        "logprobs": 2e-4,
        "replayed": 2e-4,
        "engine": 5e-3,
        "advantages": 1e-4,
        "weights": 5e-4,
        "loss": 1e-4,
        "norm": 2e-4,
        "sgd": 2e-4,
        "adam": 1e-4,
        "decay": 0.02,
        "moments": 2e-4,
        "number": 1e-6,
        "score": 1e-5,
        "sum": 2.0**-22,
    },
    "bfloat16": {
        "logprobs": 0.6,
        "replayed": 0.6,
        "engine": 1.5,
        "advantages": 0.5,
        "weights": 0.8,
        "loss": 0.1,
        "norm": 0.15,
        "sgd": 0.3,
        "adam": 0.5,
        "decay": 0.3,
        "moments": 0.3,
        "number": 1e-6,
        "score": 0.03,
        "sum": 2.0**-22,
    },
}
# Limit of a token's mean distance, as a share of the limit of the largest one. Adam's first steps
# also divide gradients that are mere rounding, so updated weights spread errors over all tokens.
MEAN_SHARES: Mapping[str, float] = {"logprobs": 1 / 20, "engine": 1 / 20, "replayed": 1 / 5}


# For bfloat16 runs the audit also computes scores and first gradients in bfloat16: their distance
# from float64 measures the rounding of this model. For scores, NOISE_SAFETY times the mean distance
# is the limit of the run's mean distance and the unit of floors. For gradients, NOISE_OF_GRADIENTS
# times the distance limits the first gradient's norm and Adam's moments.
NOISE_SAFETY, NOISE_OF_GRADIENTS = 4, 6


def tolerances_of(compute_dtype: str) -> Mapping[str, float]:
    """Return the tolerances of a dtype.

    Raises:
        ValueError: The dtype has no tolerances.
    """
    if compute_dtype not in TOLERANCES:
        raise ValueError(
            f"no tolerances for runs in {compute_dtype}: expected {', '.join(TOLERANCES)}"
        )
    return TOLERANCES[compute_dtype]
