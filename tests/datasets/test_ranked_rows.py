"""Rankings as token ids, and what is wrong with rows in one line."""

import pytest
from tests.datasets.row_files import written

from lightrft.config import TrainConfig
from lightrft.datasets.files import read_rows
from lightrft.datasets.ranked_rows import RANKED
from lightrft.tools.model_presets import byte_level_tokenizer

GOOD = {"prompt": "2+2=", "answers": ["4", "5", "five"], "ranks": [1, 2, 2]}


def load(tmp_path, *rows, **changes):
    path = written(tmp_path, rows)
    config = TrainConfig(**{"max_row_tokens": 100, **changes})
    settings = {"path": path, "vocab_size": None, "reader": None}
    return RANKED.of(read_rows(path), byte_level_tokenizer(), config, **settings)


@pytest.mark.parametrize("is_chat", [False, True])
def test_answers_stand_behind_their_prompt_and_end_as_a_policy_ends_them(tmp_path, is_chat):
    prompt = [{"role": "user", "content": "2+2="}] if is_chat else "2+2="
    (found,) = load(tmp_path, GOOD | {"prompt": prompt}).rows
    assert found.ranks == (1.0, 2.0, 2.0)
    before = "<|user|>2+2=<|assistant|>" if is_chat else "2+2="
    texts = [byte_level_tokenizer().decode(answer.token_ids) for answer in found.rows]
    assert texts == [f"{before}{answer}<|end|>" for answer in GOOD["answers"]]
