"""Rows of scores: ids and numbers as they are given, and refusals."""

from tests.datasets.row_files import written
from tests.datasets.test_supervised_rows import family_tokenizer

from lightrft.config import TrainConfig
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
