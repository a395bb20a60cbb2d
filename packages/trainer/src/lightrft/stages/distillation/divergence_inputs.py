"""Inputs of distillation on rows of a data set: supervised rows and the teacher."""

from __future__ import annotations

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.parts.learning import is_served
from lightrft.datasets.row_data import SupervisedRow
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.engines.media.families import has_row
from lightrft.models import load_config
from lightrft.stages.distillation.divergence_objective import DivergenceObjective, KnownTeachers
from lightrft.stages.distillation.own_samples import check_prompts
from lightrft.stages.distillation.served_rows import open_servers
from lightrft.stages.models import load_teachers
from lightrft.stages.rows.row_inputs import (
    RowInputs,
    build_model,
    check_auditable,
    read_rows,
    require_options,
)
from lightrft.stages.stage import TrainedModels
from lightrft.stages.start_checks import prompts_within_context
from lightrft.stages.teachers import prove_teachers
from lightrft.strategy.model_training import ModelTraining


class DivergenceInputs(RowInputs[SupervisedRow, KnownTeachers]):
    """Rows of a run; see `RowInputs`."""

    def load(
        self, config: TrainConfig, training: ModelTraining, num_steps: int
    ) -> tuple[TrainedModels, DivergenceObjective]:
        """Load student and teachers, and build the objective."""
        models = build_model(config, training, num_steps)
        teachers = load_teachers(config.teacher_folders, config, training.backend)
        servers = open_servers(config)
        return models, DivergenceObjective(teachers, servers, config.offpolicy_fraction < 1)


def read_inputs(config: TrainConfig) -> DivergenceInputs:
    """Check the options and the teacher, then read the rows.

    Raises:
        ConfigError: Options that cannot be run, or a teacher with other tokens.
        DataError: Rows that cannot be used.
        ModelLoadError: A tokenizer that cannot be read.
    """
    if not config.teacher_places or config.distillation_stage == "policy":
        raise ConfigError("distillation on rows needs a teacher and teacher_form: give both")
    if config.fused_linear_logprob is False:
        raise ConfigError(
            "fused_linear_logprob: distillation on rows always computes in chunks: leave it out"
        )
    if config.pretrain is not None and has_row(load_config(config.pretrain)):
        raise ConfigError(f"pretrain: {config.pretrain} reads images, and a teacher sees texts")
    is_plain = [*config.teacher_places] == [""] and not is_served(config.teacher_places[""])
    if config.audit_every and (not is_plain or config.offpolicy_fraction < 1):
        raise ConfigError(
            "audit_every recomputes the divergence from one teacher of a folder on given rows: "
            "leave it out"
        )
    require_options(config, "distill")
    reading, data, held_out = read_rows(config, load_supervised)
    if any(row.shown for row in data.rows):
        raise ConfigError("prompt_data has images, and a teacher sees texts: leave them out")
    check_auditable(config, data.rows)
    if config.offpolicy_fraction < 1:
        check_prompts(data.rows, config.replaced(prompts_within_context(config)))
    texts = [row.token_ids.tolist() for row in data.rows[:64]]
    prove_teachers(config, reading.tokenizer, texts)
    return DivergenceInputs(reading, data, held_out)
