"""Teachers by row and with prompts of their own: each scores its rows, and the student's tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightrft.config import TrainConfig
from lightrft.datasets import Prompt
from lightrft.datasets.types import DataError
from lightrft.experience.teachers import (
    PromptedTeacher,
    ServedTeacher,
    TeacherError,
    TeacherRows,
    TeachersByRow,
    TextScores,
    ask_together,
)
from lightrft.records.batch import RolloutBatch


class OneRank:
    """Collectives of a single process."""

    sp_group = None

    def gather_objects(self, item, group=None):
        return [item]

    def all_reduce(self, data, op="mean"):
        return data


class TwoRanks(OneRank):
    """Another rank has rows of every teacher, and its server fails if told so."""

    def __init__(self, problem=""):
        self.problem = problem

    def gather_objects(self, item, group=None):
        return [item, self.problem]

    def all_reduce(self, data, op="mean"):
        return dict.fromkeys(data, 1)


def score(ids, place, slope):
    """A slow model: the logprob of a token by all that is before it."""
    return -0.001 * slope * (ids[place] + 3 * sum(ids[:place]) + place)


def toy(slope, calls):
    def teacher(batch, slices):
        calls.append([len(range(*each.indices(len(batch.token_ids)))) for each in slices])
        found = torch.zeros(batch.token_ids.shape)
        for row in range(len(found)):
            ids = batch.token_ids[row].tolist()
            for place in range(1, len(ids)):
                if batch.response_mask[row, place]:
                    found[row, place] = score(ids, place, slope)
        return found

    return teacher


def ragged(seed=0):
    """Rows of prompts 0..4 in another order, with observations in some responses."""
    generator = np.random.default_rng(seed)
    prompts = {
        place: Prompt(
            place,
            "",
            tuple(generator.integers(1, 50, 2 + place % 3).tolist()),
            columns={"teacher": "ab"[place % 2]},
            teacher_token_ids=tuple(generator.integers(50, 99, 1 + 2 * place).tolist()),
        )
        for place in range(5)
    }
    order = [3, 0, 4, 1, 2, 3]
    responses = [generator.integers(1, 50, size).tolist() for size in (4, 1, 6, 2, 5, 3)]
    rows = [[*prompts[p].token_ids, *r] for p, r in zip(order, responses, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    real = torch.tensor([[i < len(row) for i in range(width)] for row in rows])
    mask = real & torch.tensor(
        [[i >= len(prompts[p].token_ids) for i in range(width)] for p in order]
    )
    mask[2, 6:8] = False
    mask[4] = False  # excluded from the loss
    zeros = torch.zeros(len(rows))
    batch = RolloutBatch(
        ids,
        real,
        mask,
        torch.zeros(ids.shape),
        zeros,
        zeros.long(),
        torch.arange(len(rows)),
        1.0,
        prompt_places=torch.tensor(order),
    )
    return batch, prompts, order


SLICES = [slice(0, 2), slice(2, 3), slice(3, 6)]


def test_each_row_has_the_numbers_of_its_teacher_alone():
    batch, prompts, order = ragged()
    rows = TeacherRows(prompts, {"a": 1.0, "b": 0.25}, "teacher")
    calls = {"a": [], "b": []}
    teachers = {name: toy(slope, calls[name]) for name, slope in (("a", 1.0), ("b", 5.0))}
    found = TeachersByRow(teachers, rows, OneRank())(batch, SLICES)
    for row, place in enumerate(order):
        slope = 1.0 if place % 2 == 0 else 5.0
        ids = batch.token_ids[row].tolist()
        for t in range(found.shape[1]):
            expected = score(ids, t, slope) if batch.response_mask[row, t] else 0.0
            assert float(found[row, t]) == pytest.approx(expected, abs=1e-5)
    # Rows of others are not computed: a has rows 1, 2, 4 and b 0, 3, 5.
    assert calls == {"a": [[1, 1, 1]], "b": [[1, 2]]}
    assert rows.factors_of(batch)[:, 0].tolist() == [0.25 if p % 2 else 1.0 for p in order]


def test_a_rank_without_rows_takes_part_and_says_nothing():
    batch, prompts, _ = ragged()
    only_a = {k: replace(p, columns={"teacher": "a"}) for k, p in prompts.items()}
    rows, calls = TeacherRows(only_a, {"a": 1.0, "b": 1.0}, "teacher"), {"a": [], "b": []}
    teachers = {name: toy(1.0, calls[name]) for name in "ab"}
    alone = TeachersByRow(teachers, rows, OneRank())(batch, SLICES)
    assert calls["b"] == []
    together = TeachersByRow(teachers, rows, TwoRanks())(batch, SLICES)
    assert calls["b"] == [[1, 1, 1]]
    assert torch.equal(alone, together)


def test_a_prompt_of_the_teachers_own_changes_what_it_reads_and_not_what_it_scores():
    batch, prompts, order = ragged()
    teacher = PromptedTeacher(toy(1.0, []), TeacherRows(prompts))
    found = teacher(batch, SLICES)
    for row, place in enumerate(order):
        own, other = prompts[place].token_ids, prompts[place].teacher_token_ids
        size = int(batch.attention_mask[row].sum())
        shown = [*other, *batch.token_ids[row, len(own) : size].tolist()]
        for t in range(found.shape[1]):
            expected = 0.0
            if batch.response_mask[row, t]:
                expected = score(shown, t - len(own) + len(other), 1.0)
            assert float(found[row, t]) == pytest.approx(expected, abs=1e-5)
    # The proof of the first step: with the student's prompts it is the teacher alone.
    assert torch.equal(teacher.unprompted()(batch, SLICES), toy(1.0, [])(batch, SLICES))
    assert not torch.allclose(found, toy(1.0, [])(batch, SLICES))


def test_rows_of_other_prompts_are_found():
    batch, prompts, _ = ragged()
    swapped = replace(batch, prompt_places=torch.tensor([3, 0, 4, 1, 2, 0]))
    with pytest.raises(RuntimeError, match="row 5 does not begin with prompt 0 of the data"):
        PromptedTeacher(toy(1.0, []), TeacherRows(prompts))(swapped, SLICES)


def test_a_row_must_name_a_teacher():
    prompts = [Prompt(0, "", (1,), columns={"teacher": "a"}), Prompt(1, "", (2,))]
    config = TrainConfig(teachers=("a=x", "b=y"))
    with pytest.raises(DataError, match=r"row 2 .* holds None, expected the name of one of teach"):
        TeacherRows.of_run(prompts, config)
    assert TeacherRows.of_run(prompts, TrainConfig(teacher="x")) is None


class ToyServer:
    def __init__(self, fails=False):
        self.asked, self.fails = [], fails

    def score(self, texts, *, top_k=0):
        if self.fails:
            raise TeacherError("teacher http://here: gone")
        self.asked += texts
        none = np.zeros((0, 0))
        numbers = [[0.0, *(score(t, i, 1.0) for i in range(1, len(t)))] for t in texts]
        return [TextScores(np.array(each, np.float32), none, none) for each in numbers]


def test_a_server_is_asked_for_rows_that_count_and_gives_what_a_model_does():
    batch, _, _ = ragged()
    server = ToyServer()
    found = ServedTeacher(server, OneRank())(batch, SLICES)
    assert torch.allclose(found, toy(1.0, [])(batch, SLICES), atol=1e-5)
    assert len(server.asked) == 5


def test_a_failure_of_one_rank_is_that_of_all():
    with pytest.raises(TeacherError, match="gone"):
        ask_together(ToyServer(fails=True), [[1, 2]], TwoRanks())
    with pytest.raises(TeacherError, match="of another rank"):
        ask_together(ToyServer(), [[1, 2]], TwoRanks("teacher of another rank"))
