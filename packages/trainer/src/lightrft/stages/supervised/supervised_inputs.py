"""Inputs of supervised training: options and rows, checked first, then built with the model."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightrft.config import RowRunOptions, TrainConfig
from lightrft.datasets.row_data import SupervisedRow
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.stages.rows.row_inputs import (
    RowInputs,
    build_model,
    check_auditable,
    last_trained,
    read_rows,
    require_options,
    shown_mask,
)
from lightrft.stages.stage import TrainedModels
from lightrft.stages.supervised.supervised_objective import SupervisedObjective
from lightrft.strategy.model_training import ModelTraining


class SupervisedInputs(RowInputs[SupervisedRow, Tensor]):
    """Rows of a run; see `RowInputs`."""

    def introduce(self, say: Callable[[str], None]) -> None:
        """Print what the model states, and the first row."""
        self.reading.statements.say(say, last=last_trained(self.data.rows[0]))
        say(shown_mask(self.data.rows[0], self.reading.tokenizer))

    def load(
        self, config: RowRunOptions, training: ModelTraining, num_steps: int
    ) -> tuple[TrainedModels, SupervisedObjective]:
        """Load the model, and build the objective."""
        return build_model(config, training, num_steps), SupervisedObjective.of(config)


def read_inputs(config: TrainConfig) -> SupervisedInputs:
    """Check the options, then read tokenizer and rows.

    Raises:
        ConfigError: Options that cannot be run.
        DataError: Rows that cannot be used.
        ModelLoadError: A tokenizer that cannot be read.
    """
    require_options(config, "sft")
    reading, data, held_out = read_rows(config, load_supervised)
    check_auditable(config, data.rows)
    return SupervisedInputs(reading, data, held_out)
