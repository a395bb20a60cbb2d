"""The teacher's advantage, token by token."""

import math

import pytest
import torch

from lightrft.config import TrainConfig
from lightrft.experience.maker import teacher_advantages
from lightrft.records.batch import PolicyOutputs


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
