"""Teachers of a run, and proofs about them: equal tokens, equal answers, 0 to oneself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightrft.config import ConfigError, RowRunOptions, TrainConfig
from lightrft.config.parts.learning import is_served
from lightrft.experience.maker import TeacherFunction
from lightrft.experience.teachers import (
    ModelTeacher,
    PromptedTeacher,
    ServedTeacher,
    TeacherRows,
    TeachersByRow,
)
from lightrft.records.batch import ExperienceBatch
from lightrft.stages.teachers import is_own_teacher, open_server, require_zero

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext


def build_teacher(
    config: TrainConfig,
    models: Mapping[str, nn.Module],
    rows: TeacherRows | None,
    context: DistributedContext,
) -> TeacherFunction | None:
    """Return the function that scores sampled tokens for the teachers; None without any.

    Args:
        config: Options that name the teachers.
        models: Prepared models of the teachers in folders.
        rows: Texts of the prompts for teachers, if the options need them.
        context: Process groups of the ranks.

    Raises:
        ConfigError: The options need columns of prompts, and `rows` is None.
    """
    places = config.teacher_places
    if rows is None and (config.teachers or config.teacher_prompt_column is not None):
        raise ConfigError(
            "teachers and teacher_prompt_column read columns of prompt_data: use "
            "lightrft.trainer.DistillationTrainer, or one teacher without them"
        )
    teachers: dict[str, TeacherFunction] = {}
    for name, place in places.items():
        made: TeacherFunction
        if is_served(place):
            made = ServedTeacher(open_server(place, config), context)
        else:
            made = ModelTeacher(models[name])
        is_prompted = rows is not None and config.teacher_prompt_column is not None
        teachers[name] = PromptedTeacher(made, rows) if rows is not None and is_prompted else made
    if rows is not None and rows.factors:
        return TeachersByRow(teachers, rows, context)
    return next(iter(teachers.values()), None)


def check_first_step(
    batch: ExperienceBatch,
    teacher: TeacherFunction | None,
    slices: Sequence[slice],
    config: RowRunOptions,
    context: DistributedContext,
) -> None:
    """Compare student and teacher before the first update if they are one model; collective.

    A teacher with another prompt gets the student's, in the same code path.

    Raises:
        ParityError: Their logprobs differ.
    """
    if not is_own_teacher(config):
        return
    outputs, mask = batch.outputs, batch.rollouts.response_mask
    logprobs = outputs.teacher_logprobs
    if isinstance(teacher, PromptedTeacher):
        with torch.no_grad():
            logprobs = teacher.unprompted()(replace(batch.rollouts, support=None), slices)
    if outputs.old_logprobs is None or logprobs is None:
        raise RuntimeError("a teacher is compared with the logprobs before the update")
    distance = (outputs.old_logprobs - logprobs).abs().masked_fill(~mask, 0.0)
    sums = torch.stack([distance.double().sum(), mask.sum().double()])
    total, count = context.reduce_over_data(sums, "sum").tolist()
    require_zero(total / max(count, 1.0), config, context)
