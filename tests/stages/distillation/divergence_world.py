"""Stages of distillation on rows, whose teacher is another tiny model, for tests."""

from __future__ import annotations

from tests.models.tiny import tiny_model
from tests.stages.stage_world import configured, prepared
from tests.stages.supervised.supervised_world import build_actor

from lightrft.datasets.supervised_rows import SupervisedRows
from lightrft.models import Actor
from lightrft.stages.distillation.divergence_stage import DivergenceStage
from lightrft.stages.models import configure_model


def build_stage(strategy, rows, *, model=None, held_out=(), teacher_form="forward", **changes):
    """A stage on rows; its teacher is a tiny model of another seed."""
    config = configured(rows, teacher="teacher", teacher_form=teacher_form, **changes)
    models = prepared(strategy, build_actor(model or tiny_model(), config), config)
    teacher = Actor(tiny_model(seed=1))
    configure_model(teacher, config)
    teachers = {"": strategy.prepare_model(teacher)}
    data = SupervisedRows(rows, "")
    return DivergenceStage(config, strategy, models, data, held_out, teachers=teachers, servers={})
