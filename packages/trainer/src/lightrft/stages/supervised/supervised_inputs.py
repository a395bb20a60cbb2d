"""Inputs of supervised training: options and rows, checked first, then built with the model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.supervised_rows import SupervisedRow, SupervisedRows, load_supervised
from lightrft.stages.opening import shared_prompts
from lightrft.stages.rows.row_inputs import (
    RowReading,
    build_model,
    check_auditable,
    decided_for_rows,
    last_trained,
    option_problems,
    read_rows,
    shown_mask,
)
from lightrft.stages.rows.row_stage import planned_updates
from lightrft.stages.supervised.supervised_stage import SupervisedStage
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class SupervisedInputs:
    """Rows of a run; see `StageInputs`."""

    reading: RowReading
    data: SupervisedRows
    held_out: tuple[SupervisedRow, ...] = ()

    def decided(self, config: TrainConfig, strategy: StrategyBase) -> TrainConfig:
        """See `StageInputs`."""
        return decided_for_rows(config, strategy)

    def build(self, config: TrainConfig, strategy: StrategyBase) -> SupervisedStage:
        """See `StageInputs`."""
        num_steps = planned_updates(self.data, config, strategy)
        strategy.print(self.data.summary)
        self.reading.statements.say(strategy.print, last=last_trained(self.data.rows[0]))
        strategy.print(shown_mask(self.data.rows[0], self.reading.tokenizer))
        strategy.print(f"{num_steps} steps of {config.train_batch_size} rows")
        self.warn_of_shared(strategy)
        with phase("load the model", timedelta(minutes=config.timeout_minutes)):
            models = build_model(config, strategy, num_steps)
        stage = SupervisedStage(config, strategy, models, self.data, self.held_out)
        stage.text_part = self.reading.text_part
        return stage

    def warn_of_shared(self, strategy: StrategyBase) -> None:
        """Writes a line if prompts of the evaluation are trained on."""
        held_out = [row.prompt_key for row in self.held_out]
        for line in shared_prompts((row.prompt_key for row in self.data.rows), held_out):
            strategy.print(line)

    def items(self) -> Sequence[Sequence[SupervisedRow]]:
        """See `StageInputs`."""
        return [(row,) for row in self.data.rows]

    def media_digests(self) -> Iterator[bytes]:
        """See `StageInputs`."""
        return (each for item in self.items() for row in item for each in row.media_digests)

    def close(self) -> None:
        """See `StageInputs`."""


def read_inputs(config: TrainConfig, command: str = "sft") -> SupervisedInputs:
    """Checks the options, then reads tokenizer and rows.

    Args:
        config: Options of the run.
        command: See `option_problems`.

    Raises:
        ConfigError: Options that cannot be run.
        DataError: Rows that cannot be used.
        ModelLoadError: A tokenizer that cannot be read.
    """
    problems = option_problems(config, int(os.environ.get("WORLD_SIZE", "1")), command)
    if problems:
        raise ConfigError("\n".join(problems))
    reading, data, held_out = read_rows(config, load_supervised)
    check_auditable(config, data.rows)
    return SupervisedInputs(reading, data, () if held_out is None else held_out.rows)
