"""The teacher's advantage: its values and its expected gradient."""

import math

import pytest
import torch

from lightrft.config import TrainConfig
from lightrft.experience.maker import teacher_advantages
from lightrft.records.batch import PolicyOutputs

Q = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
P = torch.tensor([0.6, 0.2, 0.1, 0.1], dtype=torch.float64)


def advantages(student, teacher, mask, coef=1.0):
    outputs = PolicyOutputs(student, None, None, None, teacher_logprobs=teacher)
    return teacher_advantages(outputs, mask, TrainConfig(teacher="folder", teacher_coef=coef))


def test_each_sampled_token_has_its_own_term_and_others_none():
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 1, 0, 5]
    student, teacher = -3 * torch.rand(2, 4, 9, generator=generator, dtype=torch.float64)
    mask = torch.arange(9)[None, :] < torch.tensor(lengths)[:, None]
    mask[0, 3:5] = False  # an observation
    # What stands outside the mask is nobody's number.
    found = advantages(student.masked_fill(~mask, math.nan), teacher, mask, coef=0.7)
    for row in range(4):
        for t in range(9):
            own = 0.7 * (float(teacher[row, t]) - float(student[row, t])) if mask[row, t] else 0.0
            assert float(found[row, t]) == pytest.approx(own, abs=1e-12)


def test_the_old_logprobs_are_needed():
    outputs = PolicyOutputs(None, None, None, None, teacher_logprobs=torch.zeros(1, 2))
    with pytest.raises(RuntimeError, match="needs the logprobs before the update"):
        teacher_advantages(outputs, torch.ones(1, 2, dtype=torch.bool), TrainConfig())


def expected_ascent(logits, teacher):
    """Return the policy gradient: the mean over arms of advantage times grad log q."""
    logits = logits.detach().requires_grad_()
    student = logits.log_softmax(0)
    # As if each arm had been drawn.
    mask = torch.ones(1, len(student), dtype=torch.bool)
    drawn = advantages(student.detach()[None], teacher[None], mask)[0]
    value = (student.detach().exp() * drawn * student).sum()
    return torch.autograd.grad(value, logits)[0]


def divergence(logits, teacher):
    student = logits.log_softmax(0)
    return float((student.exp() * (student - teacher)).sum())


def test_the_mean_over_samples_is_the_gradient_of_the_reverse_divergence():
    found = expected_ascent(Q.log(), P.log())
    logits, step = Q.log(), 1e-6
    for place in range(4):
        up, down = logits.clone(), logits.clone()
        up[place], down[place] = up[place] + step, down[place] - step
        slope = (divergence(up, P.log()) - divergence(down, P.log())) / (2 * step)
        assert float(found[place]) == pytest.approx(-slope, abs=1e-9)
    assert found.tolist() == pytest.approx([0.1195, -0.1046, -0.0523, 0.0375], abs=1e-4)
