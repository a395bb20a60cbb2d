"""Rows whose completions the student samples, among those of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightrft.config import PromptDataOptions, RowDataOptions
from lightrft.datasets.row_data import SupervisedRow
from lightrft.datasets.types import DataError
from lightrft.engines.types import GenerationRequest
from lightrft.rollout.sampler import training_params
from lightrft.rollout.single_turn import generate

if TYPE_CHECKING:
    from lightrft.stages.rows.row_passes import RowPasses
    from lightrft.strategy.engine.session import EngineSession


def mixed_rows(
    passes: RowPasses, session: EngineSession, rows: Sequence[SupervisedRow], number: int
) -> tuple[SupervisedRow, ...]:
    """Return the rows of a step, some with completions of the student; collective.

    Args:
        passes: Forward passes, with the options of the run and its ranks.
        session: Engine of these ranks.
        rows: Rows of all ranks, equal on each.
        number: Number of the step.
    """
    context, places = passes.context, chosen_places(passes.config, len(rows), number)
    local = places[context.rank :: context.world_size]
    first = number * len(rows)
    requests = [
        GenerationRequest(prompt_of(rows[place]), first + place) for place in local.tolist()
    ]
    params = replace(training_params(passes.config), n=1)
    outputs = generate(session, params, requests)
    session.sleep(level=2)
    parts = [(each.request_id - first, each.output_token_ids) for each in outputs]
    mixed = list(rows)
    for part in context.gather_objects(parts):
        for place, output in part:
            mixed[place] = with_completion(rows[place], output)
    return tuple(mixed)


def chosen_places(config: RowDataOptions, num_rows: int, number: int) -> NDArray[np.int64]:
    """Return the places of the rows that the student completes; their mean share is as set."""
    generator = np.random.default_rng((config.seed, number))
    count = int(num_rows * (1 - config.offpolicy_fraction) + generator.random())
    return np.sort(generator.permutation(num_rows)[:count])


def prompt_of(row: SupervisedRow) -> tuple[int, ...]:
    """Return the tokens before the first trained one."""
    return tuple(row.prompt_ids.tolist())


def with_completion(row: SupervisedRow, output: Sequence[int]) -> SupervisedRow:
    """Return a row of the prompt and these tokens, all of which are trained."""
    prompt = prompt_of(row)
    return replace(
        row,
        token_ids=np.array([*prompt, *output], dtype=np.int32),
        is_trained=np.array([False] * len(prompt) + [True] * len(output)),
    )


def check_prompts(rows: Sequence[SupervisedRow], config: PromptDataOptions) -> None:
    """Raise a DataError if the student cannot complete the prompt of a row."""
    for place, row in enumerate(rows):
        size = len(prompt_of(row))
        if not 0 < size <= config.prompt_max_len:
            raise DataError(
                f"{config.prompt_data}: the prompt of row {place + 1} has {size} tokens: to sample "
                f"completions (offpolicy_fraction {config.offpolicy_fraction:g}) it must have from "
                f"1 to prompt_max_len = {config.prompt_max_len}, which leaves room for "
                "generate_max_len in the model's context; change them, or leave the row out"
            )
