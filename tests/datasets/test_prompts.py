"""Prompts: keys, templates, limits, counts, and errors that name the remedy."""

import copy

import pytest

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets import DataError, Prompt, collate_prompts, load_prompts

ROWS = [
    {"input": "one two", "label": "2", "level": 1},
    {"input": "two", "label": 3, "level": 2},
    {"input": "three three three", "label": None, "level": 3},
]
MESSAGES = [{"role": "user", "content": "one"}]


def test_rows_become_prompts_with_ids_labels_and_columns(write, tokenizer):
    path = write("a.jsonl", ROWS)
    dataset = load_prompts(path, tokenizer)
    assert list(dataset) == [
        Prompt(0, "one two", (1, 3, 4), "2", ROWS[0]),
        Prompt(1, "two", (1, 4), "3", ROWS[1]),
        Prompt(2, "three three three", (1, 5, 5, 5), None, ROWS[2]),
    ]
    assert len(dataset) == 3
    assert collate_prompts([dataset[0], dataset[1]]) == [dataset[0], dataset[1]]
    report = dataset.report
    assert (report.num_rows, report.num_prompts, report.too_long) == (3, 3, ())
    assert (report.num_without_label, report.max_prompt_tokens) == (1, 4)
    assert report.summary() == f"{path}: 3 prompts of at most 4 tokens; 1 without label"


def test_long_prompts_are_dropped_and_counted_with_their_places(write, tokenizer):
    path = write("a.jsonl", ROWS)
    dataset = load_prompts(path, tokenizer, TrainConfig(prompt_max_len=3))
    assert [prompt.id for prompt in dataset] == [0, 1]
    assert dataset.report.too_long == (f"{path}:3",)
    assert "dropped 1 over-long (first: " in dataset.report.summary()
    assert (
        len(load_prompts(path, tokenizer, TrainConfig(prompt_max_len=4))) == 3
    )  # exactly at the limit
    with pytest.raises(DataError, match=r"all 3 prompts exceed prompt_max_len = 1.*raise"):
        load_prompts(path, tokenizer, TrainConfig(prompt_max_len=1))


def test_max_samples_keeps_the_first_that_fit_and_reads_no_further(write, tokenizer):
    rows = [ROWS[2], ROWS[0], ROWS[1], {"input": 7}]
    dataset = load_prompts(
        write("a.jsonl", rows), tokenizer, TrainConfig(prompt_max_len=3), max_samples=2
    )
    assert [prompt.id for prompt in dataset] == [1, 2]
    assert dataset.report.num_rows == 3
    with pytest.raises(DataError, match="must be at least 1"):
        load_prompts(write("a.jsonl", rows), tokenizer, max_samples=0)


def test_more_rows_than_one_tokenizer_batch_keep_their_order(write, tokenizer):
    rows = [{"input": f"one {i}", "label": str(i)} for i in range(2300)]
    dataset = load_prompts(write("a.jsonl", rows), tokenizer)
    assert [prompt.label for prompt in dataset] == [str(i) for i in range(2300)]
    assert [prompt.id for prompt in dataset] == list(range(2300))


def test_the_chat_template_writes_the_special_tokens(write, tokenizer):
    path = write("a.jsonl", [{"input": "one"}, {"input": MESSAGES}])
    dataset = load_prompts(
        path, tokenizer, TrainConfig(apply_chat_template=True, system_prompt="two")
    )
    text = "<system> two </s><user> one </s><assistant>"
    assert [prompt.text for prompt in dataset] == [text, text]
    assert dataset[0].token_ids[0] != 1  # no second <s>


def test_the_template_slot_is_not_the_braces_of_boxed(write, tokenizer):
    path = write("a.jsonl", [{"input": "one {} \\1"}])
    template = "Answer in \\boxed{}. {} Go. {}"
    dataset = load_prompts(path, tokenizer, TrainConfig(input_template=template))
    assert dataset[0].text == "Answer in \\boxed{}. one {} \\1 Go. {}"
    for broken in ("no slot", "only \\boxed{}"):
        with pytest.raises(ConfigError, match="where the prompt goes"):
            TrainConfig(input_template=broken)


def test_labels_that_are_not_text_become_json(write, tokenizer):
    labels = [1.5, ["a", "\u00e4"], {"k": 1}, True]
    dataset = load_prompts(
        write("a.jsonl", [{"input": "one", "label": label} for label in labels]), tokenizer
    )
    assert [prompt.label for prompt in dataset] == ["1.5", '["a", "\u00e4"]', '{"k": 1}', "true"]


def test_prompt_and_label_are_columns_under_their_own_names_as_json_holds_them(write, tokenizer):
    chat = TrainConfig(input_key="chat", label_key="gold", apply_chat_template=True)
    rows = [{"chat": MESSAGES, "gold": 5}, {"chat": "two", "gold": {"k": [1]}}]
    first, second = load_prompts(write("a.jsonl", rows), tokenizer, chat)
    assert first.columns == rows[0]
    assert first.label == "5"
    assert second.columns == rows[1]
    as_conversations = chat.replaced({"input_key": "conversations"})
    (named,) = load_prompts(
        write("b.jsonl", [{"conversations": MESSAGES, "gold": 5}]), tokenizer, as_conversations
    )
    assert named.columns == {"gold": 5}


def test_a_tokenizer_without_a_chat_template_is_named(write, tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(DataError, match=r"the tokenizer has no chat template.*--input_template"):
        path = write("a.jsonl", [{"input": "one"}])
        load_prompts(path, bare, TrainConfig(apply_chat_template=True))
