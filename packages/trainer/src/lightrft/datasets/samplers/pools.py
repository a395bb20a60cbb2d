"""Draws by what the run observes: prompts that teach nothing now come up less often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lightrft.config import ConfigError
from lightrft.datasets.prompt_sampler import Drawn, GroupResult, RowChoice


class Pools:
    """Prompts drawn as often as their groups have a signal, up to `rest_weight`.

    A group has no signal if all its samples have equal accuracies: the prompt is always or never
    solved, and its advantages are 0. The weight of a prompt is the moving rate of its groups that
    have a signal: the mean of the first ones, in which later ones count 1 - `decay` at least. A
    prompt at rest has `rest_weight`. It has 1 before its first group and once its last one is
    `readmit_steps` steps old; but prompts that `prompt_rates` calls always or never solved rest in
    the first `readmit_steps` steps.

    Args:
        rows: Prompts to draw from.
        rest_weight: Least weight of a prompt; the largest is 1.
        readmit_steps: Steps after which a result is forgotten.
        decay: Share of the older rate in the moving rate.

    Raises:
        ConfigError: There are no rewards, or a hyper-parameter is out of range.
    """

    def __init__(
        self,
        rows: RowChoice,
        *,
        rest_weight: float = 0.1,
        readmit_steps: int = 50,
        decay: float = 0.5,
    ) -> None:
        if not rows.has_rewards:
            raise ConfigError(
                "prompt_sampler pools follows rewards of samples, and this stage has none: take "
                "weighted with prompt_weight"
            )
        if not 0 < rest_weight <= 1 or readmit_steps < 1 or not 0 <= decay < 1:
            raise ConfigError(
                "prompt_sampler pools: expected 0 < rest_weight <= 1, readmit_steps >= 1 and "
                f"0 <= decay < 1: got {rest_weight:g}, {readmit_steps} and {decay:g}"
            )
        self._rows, self._decay = rows, decay
        self._rest_weight, self._readmit_steps = rest_weight, readmit_steps
        # By place: moving rate, groups, step of the last one. Only what is not forgotten is kept,
        # so a state does not grow with the data.
        self.state: dict[str, object] = {"num_draws": 0, "num_steps": 0, "seen": {}}

    def draw(self, n: int) -> list[Drawn]:
        """Return the next places."""
        number = int(str(self.state["num_draws"]))
        self.state["num_draws"] = number + 1
        return self._rows.draw_by(self.probabilities(), n, number)

    def probabilities(self) -> NDArray[np.float64]:
        """Return the share of each prompt in the next draws: [prompts]."""
        weights = np.ones(self._rows.num_rows)
        if self._rows.rates and self._num_steps < self._readmit_steps:
            weights[[each.num_right in (0, each.num_samples) for each in self._rows.rates]] = 0.0
        for place, (rate, *_) in self._seen.items():
            weights[int(place)] = rate
        weights = np.maximum(weights, self._rest_weight)
        shares: NDArray[np.float64] = weights / weights.sum()
        return shares

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Move the rates of a step's prompts, and forget those of prompts not seen for long."""
        step, seen = self._num_steps + 1, dict(self._seen)
        for each in results:
            if each.accuracies:  # a sample was scored
                rate, count, _ = seen.get(str(each.place), (0.0, 0, 0))
                count += 1
                rate += max(1 / count, 1 - self._decay) * ((not each.has_no_signal) - rate)
                seen[str(each.place)] = rate, count, step
        seen = {i: each for i, each in seen.items() if step - each[2] < self._readmit_steps}
        self.state |= {"num_steps": step, "seen": seen}

    @property
    def _num_steps(self) -> int:
        return int(str(self.state["num_steps"]))

    @property
    def _seen(self) -> dict[str, tuple[float, int, int]]:
        return cast("dict[str, tuple[float, int, int]]", self.state["seen"])
