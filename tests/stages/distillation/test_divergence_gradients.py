"""The gradient of a step on a divergence is that of the formula in float64."""

import numpy as np
import pytest
import torch
from tests.models.tiny import tiny_model
from tests.stages.distillation.divergence_world import build_stage
from tests.stages.stage_world import require_formula, step_of
from tests.stages.supervised.supervised_world import RAGGED

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
    student, teacher, total = tiny_model().double(), tiny_model(seed=1).double(), 0.0
    for each in RAGGED:
        ids = torch.from_numpy(each.token_ids).long()[None]
        with torch.no_grad():
            p = teacher(ids).logits[0].log_softmax(-1)
        q = student(ids).logits[0].log_softmax(-1)
        for place in np.flatnonzero(each.is_trained):
            total = total + FORMS[form](p[place - 1], q[place - 1]) / 101
    step = step_of(build_stage, RAGGED, teacher_form=form, **beta)
    require_formula(step, total, student)
