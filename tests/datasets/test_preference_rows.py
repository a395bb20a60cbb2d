"""Rows of preferences: ids and trained tokens of both answers, margins, labels, refusals."""

from functools import partial

import pytest
from tests.datasets import row_files
from tests.datasets.row_files import CHAT, family_tokenizer
from tests.datasets.test_supervised_rows import SPOKEN

from lightrft.datasets.preference_rows import load_preferences
from lightrft.datasets.types import DataError

ASK, OK, MORE, ALL = CHAT
TEXTS = {"prompt": "hello ", "chosen": "ok", "rejected": "all"}
IDS = {"prompt_ids": [3, 4], "chosen_ids": [5, 6], "rejected_ids": [7]}
# Ways of saying that `ok.` is a better answer to `hello` than `all`.
CHATS = {
    "continued": {"prompt": [ASK], "chosen": [OK], "rejected": [ALL]},
    "implicit prompt": {"chosen": [ASK, OK], "rejected": [ASK, ALL]},
    "prompt given, too": {"prompt": [ASK], "chosen": [ASK, OK], "rejected": [ASK, ALL]},
    "prompt as text": {"prompt": "hello", "chosen": [ASK, OK], "rejected": [ASK, ALL]},
    "answers as texts": {"prompt": [ASK], "chosen": "ok.", "rejected": "all"},
    "ShareGPT": {"chosen": SPOKEN[:2], "rejected": [SPOKEN[0], SPOKEN[3]]},
}


load = partial(row_files.load, load_preferences)


def shown(row):
    """The text of a row, and what is trained of it."""
    decode = family_tokenizer().decode
    return decode(row.token_ids), decode(row.token_ids[row.is_trained])


def test_texts_share_a_prompt_and_end(tmp_path):
    data = load(tmp_path, [TEXTS])
    assert [shown(row) for row in data.rows[0].rows] == [
        ("hello ok<|im_end|>", "ok<|im_end|>"),
        # The blank and the first letter are one token, which is sampled.
        ("hello all<|im_end|>", " all<|im_end|>"),
    ]
    assert data.is_paired
    assert "1 pairs, 5 of 8 tokens are of answers" in data.summary


def test_texts_may_be_put_into_the_chat_template(tmp_path):
    row = {"prompt": "hello", "chosen": "ok.", "rejected": "all"}
    (found,) = load(tmp_path, [row], apply_chat_template=True).rows
    (expected,) = load(tmp_path, [CHATS["continued"]]).rows
    assert list(map(shown, found.rows)) == list(map(shown, expected.rows))


@pytest.mark.parametrize("name", CHATS)
def test_conversations_are_trained_behind_what_they_share(tmp_path, name):
    (pair,) = load(tmp_path, [CHATS[name]]).rows
    (whole, chosen), (_, rejected) = map(shown, pair.rows)
    assert "user\nhello<|im_end|>\n<|im_start|>assistant\nok.<|im_end|>" in whole
    assert (chosen, rejected) == ("ok.<|im_end|>", "all<|im_end|>")


def test_shared_answers_are_context(tmp_path):
    worse = {"role": "assistant", "content": "hell"}
    row = {"chosen": CHAT, "rejected": [ASK, OK, MORE, worse]}
    (pair,) = load(tmp_path, [row]).rows
    (whole, chosen), (_, rejected) = map(shown, pair.rows)
    assert "ok.<|im_end|>" in whole
    assert (chosen, rejected) == ("all<|im_end|>", "hell<|im_end|>")


@pytest.mark.parametrize(
    "columns, margin",
    [
        ({}, None),
        ({"margin": 0.5}, 0.5),
        ({"score_chosen": 400, "score_rejected": 1.5}, None),
        ({"score_chosen": 4}, None),
        ({"margin": 0.0, "score_chosen": 2, "score_rejected": -2}, 0.0),
        ({"margin": None, "score_chosen": 2, "score_rejected": None}, None),
    ],
)
def test_margins_are_a_column_alone_whatever_the_scale_of_scores(tmp_path, columns, margin):
    assert load(tmp_path, [TEXTS | columns]).rows[0].margin == margin


def test_pairs_of_ids_are_taken_as_they_are(tmp_path):
    # The end of a sequence is neither added nor removed.
    row = IDS | {"chosen_ids": [1, 99, 2], "rejected_ids": [99]}
    data = load(tmp_path, [row, IDS | {"margin": 0.5, "chosen": "text"}], vocab_size=100)
    assert [each.token_ids.tolist() for each in data.rows[0].rows] == [[3, 4, 1, 99, 2], [3, 4, 99]]
    assert [each.is_trained.tolist() for each in data.rows[0].rows] == [
        [False, False, True, True, True],
        [False, False, True],
    ]
    assert [each.margin for each in data.rows] == [None, 0.5]
    assert data.is_paired


def test_answers_may_be_labelled_one_by_one(tmp_path):
    rows = [
        {"prompt": "hello ", "completion": "ok", "label": True},
        {"prompt": "more ", "completion": "all", "label": False},
    ]
    data = load(tmp_path, rows)
    assert [each.is_good for each in data.rows] == [True, False]
    assert [shown(each.answer)[1] for each in data.rows] == ["ok<|im_end|>", " all<|im_end|>"]
    assert not data.is_paired
    chats = [{"prompt": [ASK], "completion": [OK], "label": True}]
    assert shown(load(tmp_path, chats).rows[0].answer)[1] == "ok.<|im_end|>"


def test_a_pair_with_a_long_answer_is_left_out_as_a_whole(tmp_path):
    rows = [TEXTS, TEXTS | {"rejected": "a" * 50}, TEXTS | {"chosen": "more"}]
    data = load(tmp_path, rows, max_row_tokens=12)
    assert len(data) == 2
    assert data.summary.endswith(f"dropped 1 over-long (first: {tmp_path / 'rows.jsonl'}:2)")
    with pytest.raises(DataError, match="all 3 pairs exceed max_row_tokens = 2 tokens"):
        load(tmp_path, rows, max_row_tokens=2)


def test_several_turns_with_stripped_thinking_are_refused(tmp_path):
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nok."}
    row = {"prompt": [ASK], "chosen": [thought, MORE, ALL], "rejected": [OK]}
    with pytest.raises(DataError, match=r"rows.jsonl:1, chosen: the chat template shows earlier"):
        load(tmp_path, [row], tokenizer=family_tokenizer("Qwen3", use_regex=True))
