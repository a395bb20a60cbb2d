"""Inputs of distillation on given rows: those of supervised training, and the teacher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.rules import SAMPLED, is_served
from lightrft.datasets.supervised_rows import SupervisedRow
from lightrft.engines.media.families import family_of
from lightrft.models import load_config
from lightrft.stages.distillation.divergence_stage import DivergenceStage
from lightrft.stages.distillation.own_samples import check_prompts
from lightrft.stages.distillation.served_rows import open_servers
from lightrft.stages.models import prove_models
from lightrft.stages.opening import prompts_within_context
from lightrft.stages.rows.row_inputs import build_model
from lightrft.stages.rows.row_stage import planned_updates
from lightrft.stages.supervised.supervised_inputs import SupervisedInputs, read_inputs as read_rows
from lightrft.stages.teachers import load_teachers, prove_teachers
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
        self.rows.reading.statements.say(strategy.print)
        strategy.print(f"{num_steps} steps of {config.train_batch_size} rows")
        self.rows.warn_of_shared(strategy)
        with phase("load the models", timedelta(minutes=config.timeout_minutes)):
            models = build_model(config, strategy, num_steps)
            teachers = load_teachers(config, strategy)
        if config.offpolicy_fraction < 1:
            each = (models.main.model, *teachers.values())
            config = prove_models(config, strategy, each, kept=DivergenceStage.kept_dropout)
            strategy.setup_inference_engine(config, config.engine_type, actor=models.main.model)
        stage = DivergenceStage(
            config,
            strategy,
            models,
            data,
            self.rows.held_out,
            teachers=teachers,
            servers=open_servers(config),
        )
        stage.text_part = self.rows.reading.text_part
        return stage

    def items(self) -> Sequence[Sequence[SupervisedRow]]:
        """See `StageInputs`."""
        return self.rows.items()

    def media_digests(self) -> Iterator[bytes]:
        """See `StageInputs`."""
        return (each for item in self.items() for row in item for each in row.media_digests)

    def close(self) -> None:
        """See `StageInputs`."""


def read_inputs(config: TrainConfig) -> DivergenceInputs:
    """Checks the options and the teacher, then reads the rows.

    Raises:
        ConfigError: Options that cannot be run, or a teacher of other tokens.
        DataError: Rows that cannot be used.
        ModelLoadError: A tokenizer that cannot be read.
    """
    if not config.teacher_places or config.teacher_form == SAMPLED:
        raise ConfigError("distillation on rows needs a teacher and teacher_form: give both")
    given = ["sft_loss"] * (config.sft_loss != TrainConfig.sft_loss)
    # The output projection is always computed in chunks.
    given += ["fused_linear_logprob"] * (config.fused_linear_logprob is False)
    if given:
        raise ConfigError(f"{' and '.join(given)}: not of distillation on rows: leave it out")
    if config.pretrain is not None and family_of(load_config(config.pretrain)) is not None:
        raise ConfigError(f"pretrain: {config.pretrain} reads images, and a teacher sees texts")
    is_plain = [*config.teacher_places] == [""] and not is_served(config.teacher_places[""])
    if config.audit_every and (not is_plain or config.offpolicy_fraction < 1):
        raise ConfigError(
            "audit_every recomputes the divergence from one teacher of a folder on given rows: "
            "leave it out"
        )
    rows = read_rows(config, "distill")
    if config.offpolicy_fraction < 1:
        check_prompts(rows.data.rows, prompts_within_context(config))
    prove_teachers(
        config, rows.reading.tokenizer, [row.token_ids.tolist() for row in rows.data.rows[:64]]
    )
    return DivergenceInputs(rows)
