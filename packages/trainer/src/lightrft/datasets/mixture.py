"""Rows of several sources as one list: one after another, or mixed in given proportions."""

import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from lightrft.config.sources import probability_problem, split_sources
from lightrft.datasets.files import Row, read_rows
from lightrft.datasets.types import DataError


def read_sources(
    text: str | Path, *, split: str = "train", probabilities: Sequence[float] = (), seed: int = 0
) -> list[Row]:
    """The rows of one or several sources, in an order that depends on the arguments alone.

    Without probabilities the sources follow one another. With them every long enough part of the
    list holds the sources in these proportions, no row comes twice, and the list is as long as
    that allows: of a source with too many rows, some are drawn by the seed.

    Args:
        text: Files, folders or names of data sets, separated by commas.
        split: Of folders and data sets, see `read_rows`.
        probabilities: One for each source, with sum 1; empty follows the sizes.
        seed: Draws the rows of sources that are not used whole.

    Raises:
        DataError: A source cannot be read, or probabilities do not fit the sources.
    """
    sources = split_sources(str(text))
    problem = probability_problem(sources, probabilities)
    if problem is not None:
        raise DataError(problem)
    tables = [read_rows(source, split=split) for source in sources]
    if len(tables) == 1 or not probabilities:
        return [row for table in tables for row in table]
    order = mixture_order([len(table) for table in tables], probabilities, seed=seed)
    return [tables[source][row] for source, row in order]


def mixture_order(
    sizes: Sequence[int], probabilities: Sequence[float], *, seed: int
) -> list[tuple[int, int]]:
    """Places (source, row) of the longest mixture without repetition.

    The k-th row of source i stands at (k + 1/2) / p_i on a common scale, so that the first n
    places hold n p_i rows of each source, give or take one.

    Args:
        sizes: Rows of each source.
        probabilities: One for each source, positive.
        seed: Draws the rows of sources that are not used whole.
    """
    shares = [Fraction(value).limit_denominator(10**9) for value in probabilities]
    length = min(size / share for size, share in zip(sizes, shares, strict=True))
    marked = []
    for source, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        count = min(size, int(length * share + Fraction(1, 2)))
        rows = sorted(random.Random(f"{seed} {source}").sample(range(size), count))
        half = Fraction(1, 2)
        marked += [((k + half) / share, source, row) for k, row in enumerate(rows)]
    return [(source, row) for _, source, row in sorted(marked)]
