"""Draws in proportion to weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightrft.config import ConfigError
from lightrft.datasets.prompt_sampler import Drawn, GroupResult, RowChoice


class Weighted:
    """Rows in proportion to `prompt_weight`, or to the spread of `prompt_rates`; without passes.

    Args:
        rows: Rows to draw from.

    Raises:
        ConfigError: The rows have no weights.
    """

    def __init__(self, rows: RowChoice) -> None:
        weights = rows.weights
        if weights is None and rows.rates:
            spreads = np.array([each.spread for each in rows.rates])
            weights = spreads / spreads.sum()
        if weights is None:
            raise ConfigError(
                "prompt_sampler weighted needs weights: name their column by prompt_weight, or "
                "give prompt_rates"
            )
        self._rows, self._weights = rows, weights
        self.state: dict[str, object] = {"num_draws": 0}

    def draw(self, n: int) -> list[Drawn]:
        """Return the next places."""
        number = int(str(self.state["num_draws"]))
        self.state = {"num_draws": number + 1}
        return self._rows.draw_by(self._weights, n, number)

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Do nothing: results do not change the weights."""
