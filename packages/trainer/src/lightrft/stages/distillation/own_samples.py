"""Rows whose completions the student samples anew, among those of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightrft.config import TrainConfig
from lightrft.datasets.row_data import SupervisedRow
from lightrft.datasets.types import DataError
from lightrft.engines.types import GenerationRequest
from lightrft.rollout.sampler import training_params
from lightrft.rollout.single_turn import generate

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class OwnSamples:
    """The student's samples of a run.

    Args:
        config: Its `offpolicy_fraction`, and how is sampled.
        strategy: Hosts the engine.
    """

    config: TrainConfig
    strategy: StrategyBase

    def mixed(self, rows: Sequence[SupervisedRow], number: int) -> tuple[SupervisedRow, ...]:
        """The rows of a step, some with completions of the student; collective.

        Args:
            rows: Of all ranks, the same on each.
            number: Of the step.
        """
        places = self.chosen(len(rows), number)
        own = places[self.strategy.context.rank :: self.strategy.world_size]
        first = number * len(rows)
        requests = [
            GenerationRequest(prompt_of(rows[place]), first + place) for place in own.tolist()
        ]
        params = replace(training_params(self.config), n=1)
        found = generate(self.strategy.session, params, requests)
        self.strategy.sleep_until_weight_sync()
        parts = [(each.request_id - first, each.output_token_ids) for each in found]
        mixed = list(rows)
        for part in self.strategy.gather_objects(parts):
            for place, output in part:
                mixed[place] = with_completion(rows[place], output)
        return tuple(mixed)

    def chosen(self, num_rows: int, number: int) -> NDArray[np.int64]:
        """Places of the rows that the student completes: as many as the share says in the mean."""
        generator = np.random.default_rng((self.config.seed, number))
        share = 1 - self.config.offpolicy_fraction
        count = int(num_rows * share + generator.random())
        return np.sort(generator.permutation(num_rows)[:count])


def prompt_of(row: SupervisedRow) -> tuple[int, ...]:
    """The tokens before the first trained one."""
    return tuple(row.prompt_ids.tolist())


def with_completion(row: SupervisedRow, output: Sequence[int]) -> SupervisedRow:
    """The row's prompt with other tokens behind it, all of which are trained."""
    prompt = prompt_of(row)
    return replace(
        row,
        token_ids=np.array([*prompt, *output], dtype=np.int32),
        is_trained=np.array([False] * len(prompt) + [True] * len(output)),
    )


def check_prompts(rows: Sequence[SupervisedRow], config: TrainConfig) -> None:
    """Raises a DataError if the student cannot complete the prompt of a row."""
    for place, row in enumerate(rows):
        size = len(prompt_of(row))
        if not 0 < size <= config.prompt_max_len:
            raise DataError(
                f"{config.prompt_data}: the prompt of row {place + 1} has {size} tokens: to sample "
                f"completions (offpolicy_fraction {config.offpolicy_fraction:g}) it must have from "
                f"1 to prompt_max_len = {config.prompt_max_len}, which leaves room for "
                "generate_max_len in the model's context; change them, or leave the row out"
            )
