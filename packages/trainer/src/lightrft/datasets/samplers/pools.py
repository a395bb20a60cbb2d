"""Draws by the pass rates of the run: what teaches nothing now comes up less often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lightrft.config import ConfigError
from lightrft.datasets.prompt_sampler import Drawn, GroupResult, RowChoice


class Pools:
    """Prompts in two pools: those whose last group had a signal, and those at rest.

    A group has no signal if all its samples have equal accuracies: the prompt is always or never
    solved, and its advantages are 0. It then rests: it is drawn `rest_weight` times as often as the
    others, until it is drawn again or `readmit_steps` steps have passed. Prompts that were not
    drawn yet do not rest, unless `prompt_rates` says that they were always or never solved.

    Args:
        rows: Prompts to draw from.
        rest_weight: Weight of a prompt at rest; others have 1.
        readmit_steps: Steps after which a prompt at rest counts as the others.
        decay: Share of the older rate in the moving pass rate.
        threshold: Least accuracy of a right response.

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
        threshold: float = 1.0,
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
        self._rows = rows
        self._rest_weight, self._readmit_steps = rest_weight, readmit_steps
        self._decay, self._threshold = decay, threshold
        size = rows.num_rows
        # Of each prompt: moving pass rate, observed groups, and the step since which it rests.
        rates, counts, resting = [0.5] * size, [0] * size, [-1] * size
        for place, each in enumerate(rows.rates):
            rates[place] = each.rate
            resting[place] = 0 if each.num_right in (0, each.num_samples) else -1
        self.state: dict[str, object] = {
            "num_draws": 0,
            "num_steps": 0,
            "rates": rates,
            "counts": counts,
            "resting": resting,
        }

    def draw(self, n: int) -> list[Drawn]:
        """Return the next places."""
        number = int(str(self.state["num_draws"]))
        self.state["num_draws"] = number + 1
        return self._rows.draw_by(self.probabilities(), n, number)

    def probabilities(self) -> NDArray[np.float64]:
        """Return the share of each prompt in the next draws: [prompts]."""
        step, since = int(str(self.state["num_steps"])), np.array(self.state["resting"])
        rests = (since >= 0) & (step - since < self._readmit_steps)
        weights = np.where(rests, self._rest_weight, 1.0)
        shares: NDArray[np.float64] = weights / weights.sum()
        return shares

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Move the rates of a step's prompts, and send to rest those without a signal."""
        step, old = int(str(self.state["num_steps"])) + 1, self._decay
        rates, counts, resting = (
            cast("list[float]", self.state[name]) for name in ("rates", "counts", "resting")
        )
        for each in results:
            if not each.accuracies:
                continue  # no sample was scored
            place, right = each.place, [a >= self._threshold for a in each.accuracies]
            share = sum(right) / len(right)
            known = counts[place] or len(self._rows.rates)
            rates[place] = old * rates[place] + (1 - old) * share if known else share
            counts[place] += 1
            resting[place] = step if each.has_no_signal else -1
        self.state["num_steps"] = step
