"""Rankings, answers in steps, and scores, as token ids."""

from functools import partial

import numpy as np
import pytest
from tests.datasets import row_files

from lightrft.config import TrainConfig
from lightrft.datasets.files import read_rows
from lightrft.datasets.ranked_rows import RANKED
from lightrft.stages.reward.reward_inputs import load_rows
from lightrft.tools.model_presets import byte_level_tokenizer

RANKING = {"prompt": "2+2=", "answers": ["4", "5", "five"], "ranks": [1, 2, 2]}
STEPS = {"prompt": "2+2+2=", "completions": ["2+2 is 4.", "4+2 is 7."], "labels": [True, False]}
SCORED = {"prompt_ids": [3, 4], "response_ids": [5, 6, 2], "score": 1.0}
load = partial(row_files.load, load_rows, tokenizer=byte_level_tokenizer(), vocab_size=300)


@pytest.mark.parametrize("is_chat", [False, True])
def test_answers_stand_behind_their_prompt_and_end_as_a_policy_ends_them(tmp_path, is_chat):
    prompt = [{"role": "user", "content": "2+2="}] if is_chat else "2+2="
    path = row_files.written(tmp_path, [RANKING | {"prompt": prompt}])
    options = {"path": path, "vocab_size": None, "reader": None}
    (found,) = RANKED.of(read_rows(path), byte_level_tokenizer(), TrainConfig(), **options).rows
    assert found.ranks == (1.0, 2.0, 2.0)
    before = "<|user|>2+2=<|assistant|>" if is_chat else "2+2="
    texts = [byte_level_tokenizer().decode(answer.token_ids) for answer in found.rows]
    assert texts == [f"{before}{answer}<|end|>" for answer in RANKING["answers"]]


def test_steps_end_in_their_newline_and_the_last_one_with_the_row(tmp_path):
    loaded = load(tmp_path, [STEPS])
    (each,) = loaded.rows
    assert loaded.summary.endswith("2 labelled steps in 1 answers")
    assert each.labels == (True, False)
    tokenizer, ids = byte_level_tokenizer(), each.answer.token_ids
    ends = np.flatnonzero(each.answer.is_trained)
    texts = [tokenizer.decode(ids[: end + 1]) for end in ends]
    assert texts == ["2+2+2=2+2 is 4.\n", "2+2+2=2+2 is 4.\n4+2 is 7.<|end|>"]


def test_ids_and_scores_are_taken_as_they_are(tmp_path):
    rows = [SCORED, SCORED | {"score": -2.25}, SCORED | {"score": 0}]
    rows.append(SCORED | {"response_ids": [5] * 4})
    data = load(tmp_path, rows, reward_loss="mse", max_row_tokens=5)
    assert data.summary.endswith(f"dropped 1 over-long (first: {tmp_path / 'rows.jsonl'}:4)")
    assert [each.score for each in data.rows] == [1.0, -2.25, 0.0]
    assert data.rows[0].answer.token_ids.tolist() == [3, 4, 5, 6, 2]
    assert data.rows[0].answer.is_trained.tolist() == [False, False, True, True, True]
    assert not data.is_paired
