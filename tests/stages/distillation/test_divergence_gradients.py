"""The gradient of a step on a divergence is that of the formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.models.tiny import tiny_model
from tests.stages.distillation.divergence_world import build_stage
from tests.stages.stage_world import STILL, distance, train_step
from tests.stages.supervised.supervised_world import RAGGED

from lightrft.strategy import get_fake_strategy

# Of log-probabilities p of the teacher and q of the student.
FORMS = {
    "forward": lambda p, q: kl(p, q),
    "reverse": lambda p, q: kl(q, p),
    "jsd": lambda p, q: 0.3 * kl(p, mixed(p, q)) + 0.7 * kl(q, mixed(p, q)),
}


def kl(first, second):
    return (first.exp() * (first - second)).sum()


def mixed(p, q):
    return (0.3 * p.exp() + 0.7 * q.exp()).log()


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradient_are_those_of_the_formula_in_float64(form):
    beta = {"teacher_beta": 0.3} if form == "jsd" else {}
    stage = build_stage(get_fake_strategy(STILL), RAGGED, teacher_form=form, **beta)
    found, metrics = train_step(stage, RAGGED)
    student, teacher, total = tiny_model().double(), tiny_model(seed=1).double(), 0.0
    for each in RAGGED:
        ids = torch.from_numpy(each.token_ids).long()[None]
        with torch.no_grad():
            p = teacher(ids).logits[0].log_softmax(-1)
        q = student(ids).logits[0].log_softmax(-1)
        for place in np.flatnonzero(each.is_trained):
            total = total + FORMS[form](p[place - 1], q[place - 1]) / 101
    total.backward()
    expected = {f"model.{name}": value.grad for name, value in student.named_parameters()}
    assert distance(found, expected) <= 1e-5
    assert metrics["loss"] == pytest.approx(total.item(), rel=1e-6)
