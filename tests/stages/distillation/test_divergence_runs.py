"""Whole runs of distillation on rows, with divergences over the whole vocabulary."""

from __future__ import annotations

import math

import pytest
from tests.stages.distillation.distillation_world import options, run, write_rows

from lightrft.config import TrainConfig
from lightrft.stages.parity_limits import ParityError
from lightrft.stages.teachers import require_zero
from lightrft.strategy import get_fake_strategy

FORMS = ("reverse", "forward", "jsd")


@pytest.mark.parametrize("form", FORMS)
def test_a_teacher_equal_to_the_student_gives_0(tmp_path, models, form):
    write_rows(tmp_path)
    same = {"teacher": str(models / "student"), "teacher_form": form, "max_steps": 1}
    metrics = run(models, tmp_path, **same).last_metrics
    assert abs(metrics["loss"]) < 1e-6
    assert metrics["grad_norm"] < 1e-4
    assert "teacher = student gives 0" in (tmp_path / "run/logs/rank_0.log").read_text()


def test_a_model_that_differs_from_itself_is_named(models, tmp_path):
    same = {"teacher": str(models / "student"), "teacher_form": "forward"}
    config = TrainConfig(**options(models, tmp_path, **same))
    with get_fake_strategy(config) as strategy:
        require_zero(1e-6, config, strategy.context)
        for mean in (1e-2, math.nan):
            with pytest.raises(ParityError, match="student and teacher are one model"):
                require_zero(mean, config, strategy.context)
