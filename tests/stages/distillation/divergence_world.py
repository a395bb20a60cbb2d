"""Stages of distillation on rows, whose teacher is another tiny model, for tests."""

from tests.models.tiny import tiny_model
from tests.stages.stage_world import configured, prepared
from tests.stages.supervised.supervised_world import build_actor

from lightrft.datasets.row_data import RowData
from lightrft.models import Actor
from lightrft.stages.distillation.divergence_objective import DivergenceObjective
from lightrft.stages.models import configure_model
from lightrft.stages.rows.row_stage import RowStage


def build_stage(strategy, rows, *, model=None, held_out=(), teacher_form="forward", **changes):
    """A stage on rows; its teacher is a tiny model of another seed."""
    config = configured(rows, teacher="teacher", teacher_form=teacher_form, **changes)
    models = prepared(strategy, build_actor(model or tiny_model(), config), config)
    teacher = Actor(tiny_model(seed=1))
    configure_model(teacher, config)
    teachers = {"": strategy.prepare_model(teacher)}
    objective = DivergenceObjective(teachers, {})
    return RowStage(config, strategy, models, RowData(rows, ""), held_out, objective)
