"""Inputs of distillation on given rows: those of supervised training, and the teacher."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.rules import SAMPLED
from lightrft.models import Actor
from lightrft.stages.distillation.divergence_stage import DivergenceStage
from lightrft.stages.policy.models import configure_model
from lightrft.stages.policy.teacher import require_same_tokens
from lightrft.stages.supervised.supervised_inputs import (
    SupervisedInputs,
    build_model,
    read_inputs as read_rows,
)
from lightrft.stages.supervised.supervised_stage import planned_updates
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class DivergenceInputs:
    """Rows of a run; see `StageInputs`."""

    rows: SupervisedInputs

    def decided(self, config: TrainConfig, strategy: StrategyBase) -> TrainConfig:
        """See `StageInputs`."""
        return self.rows.decided(config, strategy)

    def build(self, config: TrainConfig, strategy: StrategyBase) -> DivergenceStage:
        """See `StageInputs`."""
        data = self.rows.data
        num_steps = planned_updates(data, config, strategy)
        strategy.print(data.summary)
        strategy.print(f"{num_steps} steps of {config.train_batch_size} rows")
        with phase("load the models", timedelta(minutes=config.timeout_minutes)):
            models = build_model(config, strategy, num_steps)
            with strategy.init_model_context(config.meta_init):
                teacher = Actor.from_pretrained(str(config.teacher))
            configure_model(teacher, config)
        stage = DivergenceStage(
            config,
            strategy,
            models,
            data,
            self.rows.held_out,
            teacher=strategy.prepare_model(teacher),
        )
        stage.text_part = self.rows.tokenizer
        return stage

    def close(self) -> None:
        """See `StageInputs`."""


def read_inputs(config: TrainConfig) -> DivergenceInputs:
    """Checks the options and the teacher, then reads the rows.

    Raises:
        ConfigError: Options that cannot be run, or a teacher of other tokens.
        DataError: Rows that cannot be used.
        ModelLoadError: A tokenizer that cannot be read.
    """
    if config.teacher is None or config.teacher_form == SAMPLED:
        raise ConfigError("distillation on rows needs a teacher and teacher_form: give both")
    others = {"sft_loss": TrainConfig.sft_loss, "audit_every": TrainConfig.audit_every}
    given = [name for name, value in others.items() if config.__dict__[name] != value]
    # The output projection is always computed in chunks.
    given += ["fused_linear_logprob"] * (config.fused_linear_logprob is False)
    if given:
        raise ConfigError(f"{' and '.join(given)}: not of distillation on rows: leave it out")
    rows = read_rows(config, "distill")
    require_same_tokens(config, rows.tokenizer)
    return DivergenceInputs(rows)
