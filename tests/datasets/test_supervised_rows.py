"""Rows of supervised training: ids, and what is trained of them."""

import pytest
from tests.datasets import row_files
from tests.datasets.row_files import CHAT, family_tokenizer

from lightrft.config import ConfigError
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.datasets.types import DataError

SPOKEN = [
    {"from": {"user": "human", "assistant": "gpt"}[each["role"]], "value": each["content"]}
    for each in CHAT
]


def load(folder, rows, *, tokenizer=None, **options):
    tokenizer = tokenizer or family_tokenizer()
    data = row_files.load(load_supervised, folder, rows, tokenizer=tokenizer, **options)
    return data, [
        (tokenizer.decode(row.token_ids), tokenizer.decode(row.token_ids[row.is_trained]))
        for row in data.rows
    ]


def test_a_text_is_trained_behind_its_first_token_up_to_an_end_that_is_there_once(tmp_path):
    rows = [{"text": "hello all"}, {"text": "ok<|im_end|>"}]
    _, found = load(tmp_path, rows)
    assert found == [("hello all<|im_end|>", " all<|im_end|>"), ("ok<|im_end|>", "<|im_end|>")]


@pytest.mark.parametrize(
    "prompt, completion, trained",
    [
        ("hell ", "ok", "ok<|im_end|>"),
        # The merges "hello" and ".\n" lie on both sides: their tokens are sampled.
        ("k hell", "o", "hello<|im_end|>"),
        ("more.", "\nok", ".\nok<|im_end|>"),
        ("", "hello ok", " ok<|im_end|>"),
        ("é", "é", "é<|im_end|>"),
    ],
)
def test_a_completion_begins_with_the_token_that_holds_its_first_character(
    tmp_path, prompt, completion, trained
):
    row = {"prompt": prompt, "completion": completion}
    assert load(tmp_path, [row])[1] == [(f"{prompt}{completion}<|im_end|>", trained)]


def test_prompt_and_completion_may_be_put_into_the_chat_template(tmp_path):
    row = {"prompt": "hello", "completion": "ok."}
    data, rendered = load(tmp_path, [row], apply_chat_template=True)
    assert rendered == [(load(tmp_path, [{"messages": CHAT[:2]}])[1][0][0], "ok.<|im_end|>")]
    assert "rows (prompt and completion)" in data.summary
    # Messages, as TRL has them, need no option, and stand beside texts with it.
    asked = {"prompt": CHAT[:1], "completion": CHAT[1:2]}
    assert load(tmp_path, [asked, {**asked, "completion": "ok."}])[1] == rendered * 2
    assert load(tmp_path, [row, asked], apply_chat_template=True)[1] == rendered * 2
    with pytest.raises(DataError, match="add apply_chat_template, which takes both"):
        load(tmp_path, [row, asked])


@pytest.mark.parametrize("row", [{"messages": CHAT}, {"conversations": SPOKEN}])
@pytest.mark.parametrize(
    "train_on, trained",
    [
        (None, "ok.<|im_end|>all<|im_end|>"),
        ("assistant", "ok.<|im_end|>all<|im_end|>"),
        ("last_assistant", "all<|im_end|>"),
    ],
)
def test_turns_of_a_conversation_are_trained(tmp_path, row, train_on, trained):
    _, ((whole, found),) = load(tmp_path, [row], train_on=train_on)
    assert found == trained
    # No end of sequence stands behind the end of the turn.
    assert whole.endswith("all<|im_end|>")


def test_all_of_a_conversation_is_trained_when_asked_for(tmp_path):
    data, ((whole, trained),) = load(tmp_path, [{"messages": CHAT}], train_on="all")
    assert data.rows[0].num_trained == len(data.rows[0].token_ids) - 1
    assert whole.endswith(trained)


def test_turns_whose_thinking_the_template_strips_get_rows_of_their_own(tmp_path):
    tokenizer = family_tokenizer("Qwen3", use_regex=True)
    chat = [CHAT[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nok."}, *CHAT[2:]]
    data, found = load(tmp_path, [{"messages": chat}], tokenizer=tokenizer)
    assert [trained for _, trained in found] == [
        "<think>\nhm\n</think>\n\nok.<|im_end|>",
        "all<|im_end|>",
    ]
    assert "1 conversations in one row per turn" in data.summary


@pytest.mark.parametrize("train_on, trained", [(None, [9]), ("completion", [9]), ("all", [8, 9])])
def test_rows_of_token_ids_are_taken_as_they_are(tmp_path, train_on, trained):
    # Nothing follows a token before the first, which is not trained whatever the row says.
    row = {"token_ids": [7, 8, 9], "is_trained": [1, 0, True], "text": "hello"}
    data, _ = load(tmp_path, [row], train_on=train_on)
    assert data.rows[0].token_ids.tolist() == [7, 8, 9]
    assert data.rows[0].token_ids[data.rows[0].is_trained].tolist() == trained
    assert "1 rows (token ids)" in data.summary


@pytest.mark.parametrize(
    "pattern, options, trained",
    [
        ("ok|l", {}, "okll"),
        # The merge "hello" is one token, and a user's.
        ("hell", {"train_on": "all"}, "hello"),
        # The first group counts.
        (r"assistant\n(\w)", {}, "oka"),
        (r"<\|im_end\|>", {}, "<|im_end|><|im_end|>"),
        (r"<\|im_end\|>\n<\|im_start\|>u", {}, "<|im_end|>"),
    ],
)
def test_a_regular_expression_chooses_among_what_is_trained(tmp_path, pattern, options, trained):
    _, ((_, found),) = load(tmp_path, [{"messages": CHAT}], train_on_regex=pattern, **options)
    assert found == trained


def test_rows_without_a_match_are_left_out_and_counted(tmp_path):
    rows = [{"prompt": "a ", "completion": each} for each in ("ok", "hello", "ok.")]
    data, found = load(tmp_path, rows, train_on_regex="ok")
    assert [trained for _, trained in found] == ["ok", "ok"]
    assert data.summary.endswith("dropped 1 without a match of train_on_regex")
    with pytest.raises(DataError, match="'xx' matches no token"):
        load(tmp_path, rows, train_on_regex="xx")
    with pytest.raises(ConfigError, match="train_on_regex: got '\\(', expected a regular"):
        load(tmp_path, rows, train_on_regex="(")
