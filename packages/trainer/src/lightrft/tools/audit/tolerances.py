"""Limits of the distance of a run's value from the recomputed one: fixed here, before any run.

A run computes in float32 or bfloat16, with sums in another order; an audit in float64. What is a
count, an id or a mask must be equal. Everything else is a number of one of these kinds:

    kind          what is compared                                    relative to
    logprobs      largest distance of a token (mean distance: / 20)   1, or the value if larger
    engine        the same, between engine and trainer              1, or the value if larger
    replayed      the same, after updates (mean distance: / 5)        1, or the value if larger
    advantages    largest distance of a token                         largest advantage
    weights       largest distance of a token                         1, or the weight if larger
    loss          distance                                            sum of the sizes of its terms
    norm          distance                                            the norm
    sgd, adam     2-norm of the difference of two changes             2-norm of the change, plus the
                                                                      rounding of the weights
    moments       2-norm of the difference                            2-norm
    decay         distance of the share of weight decay               that share's unit, see replay
    number        distance                                            the number

A limit relative to a value that is 0 is no limit. So each has a floor from the rounding of what was
added up, of which these are the units:

    score         rounding of one token's logprob, entropy or value   1, or the value if larger
    sum           rounding of a float32 result                        what was added up

    quantity                  its floor
    rewards                   sum of the raw rewards' sizes and of what was subtracted
    returns, advantages       the rewards' floor as an estimator enlarges it; what a KL term in the
                              reward and values move if each score moves by its rounding
    losses                    what the sum moves if each score, reference score and advantage moves
                              by its rounding
    gradient norm, moments    norm of the gradient of those movements, with signs drawn once
    weights after             the same times the learning rates
    scores after updates      what they move if Adam's gradients move by their rounding
    learning rate             of the peak
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
        "adam": 2e-3,
        "moments": 2e-4,
        "decay": 0.02,
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
        "moments": 0.3,
        "decay": 0.3,
        "number": 1e-6,
        "score": 0.03,
        "sum": 2.0**-22,
    },
}
# The mean distance of a token may be this share of the largest one. Adam's first steps divide by
# gradients that are rounding themselves, so weights that were updated spread it over all tokens.
MEAN_SHARES: Mapping[str, float] = {"logprobs": 1 / 20, "engine": 1 / 20, "replayed": 1 / 5}


# In bfloat16 the audit computes each score and each first gradient of a model in bfloat16, too: the
# mean distance from its float64 tells what rounding does to this very model. So many times it is
# the limit of the run's mean distance of scores, the unit of their floors, and the limit of the
# distances of the first gradient's norm and of Adam's moments.
NOISE_SAFETY, NOISE_OF_GRADIENTS = 4, 6


def tolerances_of(compute_dtype: str) -> Mapping[str, float]:
    """The row of the table.

    Raises:
        ValueError: There is none for this dtype.
    """
    if compute_dtype not in TOLERANCES:
        raise ValueError(
            f"no tolerances for runs in {compute_dtype}: expected {', '.join(TOLERANCES)}"
        )
    return TOLERANCES[compute_dtype]
