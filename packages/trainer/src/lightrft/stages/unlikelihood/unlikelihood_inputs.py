"""Inputs of unlikelihood training: options and rows, checked first, then built with the model."""

from __future__ import annotations

from collections.abc import Callable

from lightrft.config import ConfigError, RowRunOptions, TrainConfig
from lightrft.datasets.preference_rows import Preference, load_preferences
from lightrft.stages.rows.row_inputs import (
    RowInputs,
    build_model,
    last_trained,
    read_rows,
    require_options,
    shown_mask,
)
from lightrft.stages.stage import TrainedModels
from lightrft.stages.unlikelihood.unlikelihood_objective import UnlikelihoodObjective
from lightrft.strategy.model_training import ModelTraining


class UnlikelihoodInputs(RowInputs[Preference, int]):
    """Pairs or labelled answers of a run; see `RowInputs`."""

    def introduce(self, say: Callable[[str], None]) -> None:
        """Print what the model states, and the first item."""
        first = self.data.rows[0]
        self.reading.statements.say(say, last=last_trained(first.rows[0]))
        for row, is_good in zip(first.rows, first.labels, strict=True):
            say(f"{'good' if is_good else 'bad'}: {shown_mask(row, self.reading.tokenizer)}")

    def load(
        self, config: RowRunOptions, training: ModelTraining, num_steps: int
    ) -> tuple[TrainedModels, UnlikelihoodObjective]:
        """Load the model, and build the objective."""
        return build_model(config, training, num_steps), UnlikelihoodObjective()


def read_inputs(config: TrainConfig) -> UnlikelihoodInputs:
    """Check the options, then read tokenizer and rows.

    Raises:
        ConfigError: Options that cannot be run.
        DataError: Rows that cannot be used.
        ModelLoadError: A tokenizer that cannot be read.
    """
    require_options(config, "unlikelihood")
    if config.audit_every:
        raise ConfigError("audit_every recomputes other stages, not unlikelihood: leave it out")
    return UnlikelihoodInputs(*read_rows(config, load_preferences))
