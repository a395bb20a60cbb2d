"""Rows of scores: ids and numbers as they are given, and refusals."""

from __future__ import annotations

import pytest
from tests.datasets.row_files import written
from tests.datasets.test_supervised_rows import family_tokenizer

from lightrft.config import TrainConfig
from lightrft.datasets.types import DataError
from lightrft.stages.reward.reward_inputs import load_rows

ROW = {"prompt_ids": [3, 4], "response_ids": [5, 6, 2], "score": 1.0}


def load(folder, rows, **options):
    path = written(folder, rows)
    return load_rows(
        path,
        family_tokenizer("Qwen2.5"),
        TrainConfig(**options),
        max_samples=100,
        split="train",
        vocab_size=100,
    )


def test_ids_and_scores_are_taken_as_they_are(tmp_path):
    data = load(tmp_path, [ROW, ROW | {"score": -2.25}, ROW | {"score": 0}], reward_loss="mse")
    assert [each.score for each in data.rows] == [1.0, -2.25, 0.0]
    assert data.rows[0].answer.token_ids.tolist() == [3, 4, 5, 6, 2]
    assert data.rows[0].answer.is_trained.tolist() == [False, False, True, True, True]
    assert not data.is_paired


def test_long_answers_are_left_out_and_counted(tmp_path):
    data = load(tmp_path, [ROW, ROW | {"response_ids": [5]}], max_row_tokens=4)
    assert len(data) == 1
    assert data.summary.endswith("1 scored answers; dropped 1 over-long")
    with pytest.raises(DataError, match="all 1 rows exceed max_row_tokens = 4"):
        load(tmp_path, [ROW], max_row_tokens=4)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ROW, ROW | {"score": 0.5}], ":2: reward_loss bce takes scores of 0 and 1: got 0.5; give"),
        ([ROW, ROW | {"score": float("nan")}], ":2: expected .*: score is missing"),
        ([ROW | {"score": True}], ":1: column 'score' must hold a finite number: got True"),
        ([ROW, {"prompt_ids": [1], "response_ids": [2]}], ":2: expected .*: score is missing"),
        ([ROW | {"response_ids": []}], ":1: column 'response_ids' must hold a token or more"),
        ([ROW | {"prompt_ids": [100]}], ":1: column 'prompt_ids': got 100, expected numbers from"),
        ([ROW | {"prompt_ids": [0.5]}], ":1: column 'prompt_ids' must hold a list of numbers"),
    ],
)
def test_a_wrong_row_is_named_with_its_place(tmp_path, rows, said):
    with pytest.raises(DataError, match=f"rows.jsonl{said}") as error:
        load(tmp_path, rows)
    assert "\n" not in str(error.value)
