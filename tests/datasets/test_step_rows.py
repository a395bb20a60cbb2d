"""Answers in steps as token ids with the ends of their steps, and what is wrong in one line."""

import numpy as np
from tests.datasets.row_files import written

from lightrft.config import TrainConfig
from lightrft.stages.reward.reward_inputs import load_rows
from lightrft.tools.model_presets import byte_level_tokenizer

GOOD = {"prompt": "2+2+2=", "completions": ["2+2 is 4.", "4+2 is 7."], "labels": [True, False]}


def load(tmp_path, *rows, **changes):
    path = written(tmp_path, rows)
    config = TrainConfig(**{"max_row_tokens": 100, **changes})
    return load_rows(path, byte_level_tokenizer(), config, max_samples=99, split="train")


def test_steps_end_in_their_newline_and_the_last_one_with_the_row(tmp_path):
    found = load(tmp_path, GOOD)
    (each,) = found.rows
    assert found.summary.endswith("2 labelled steps in 1 answers")
    assert each.labels == (True, False)
    tokenizer, ids = byte_level_tokenizer(), each.answer.token_ids
    ends = np.flatnonzero(each.answer.is_trained)
    texts = [tokenizer.decode(ids[: end + 1]) for end in ends]
    assert texts == ["2+2+2=2+2 is 4.\n", "2+2+2=2+2 is 4.\n4+2 is 7.<|end|>"]
